"""Bytes that leave nodes, against counts by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hgc.backends.simulator import Step
from hgc.backends.simulator.census import Census
from hgc.cluster import Cluster
from hgc.cost.traffic import traffic
from tests.backends.simulator.test_simulate import SIZES, plan_of, run, stages_of

FOUR = Cluster.preset("a100-80", nodes=2, per_node=2)
GLOO = replace(FOUR, nodes=tuple(replace(node, device=replace(node.device, type="cpu")) for node in FOUR.nodes))


def test_rings_cross_between_nodes_twice() -> None:
    census = Census(FOUR)
    assert census.collective("all_reduce", 100, range(4)) == 2 * 2 * 3 / 4 * 100  # from 1 to 2 and from 3 to 0
    assert census.collective("all_gather", 100, range(4)) == 2 * 3 / 4 * 100
    assert census.collective("reduce_scatter", 100, range(4)) == 2 * 3 / 4 * 100
    assert Census(GLOO).collective("reduce_scatter", 100, range(4)) == 2 * 2 * 3 / 4 * 100  # gloo makes an all-reduce of it
    assert census.collective("all_to_all", 100, range(4)) == 8 * 100 / 4  # eight pairs of ranks on two nodes
    assert census.collective("all_reduce", 100, (0, 1)) == 0
    assert census.collective("all_reduce", 100, (0, 2, 1, 3)) == 4 * 2 * 3 / 4 * 100


def test_all_groups_of_an_axis_count() -> None:
    census = Census(FOUR)
    steps = (Step(1.0, "dp", collective="all_reduce", payload_bytes=100), Step(1.0, "tp", collective="all_reduce", payload_bytes=100))
    assert (
        census.steps(steps, {"dp": 2, "tp": 2}, 0) == 2 * 2 * 2 * 1 / 2 * 100
    )  # two groups over dp, each across; those over tp stay inside
    assert census.steps(steps[:1], {"dp": 4}, 0) == 2 * 2 * 3 / 4 * 100


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_data_parallelism_sends_between_nodes(zero: int) -> None:
    plan = plan_of(f"dp4 zero{zero}" if zero else "dp4", micro_batches=2)
    (stage,) = stages_of(plan)
    often = {"forward": 2, "backward": 2, "first forward": 1, "last backward": 1}
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1}
    listed = sum(
        2 * rounds[each.collective] * 3 / 4 * float(each.payload_bytes) * often[each.when] for each in traffic(stage.program, plan.strategy)
    )
    in_graph = 2 * sum(
        2
        * rounds[each.collective]
        * 3
        / 4
        * float(
            each.payload_bytes.subs(
                {symbol: SIZES[symbol.name] / (2 if symbol.name == "b" else 1) for symbol in each.payload_bytes.free_symbols}
            )
        )
        for each in stage.costs.communication
    )
    assert run(plan, cluster=FOUR).between_nodes_bytes == pytest.approx(listed + in_graph)


def test_what_stages_send_between_nodes() -> None:
    plan = plan_of("dp2", places=2, micro_batches=4)
    activations = SIZES["b"] * SIZES["s"] * 64 * 4
    assert run(plan, cluster=FOUR).between_nodes_bytes == pytest.approx(2 * activations)  # there, and their gradients back
    assert run(plan, cluster=Cluster.preset("a100-80")).between_nodes_bytes == 0

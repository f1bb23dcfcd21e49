"""What it costs to go on with another strategy: the search, the simulator and the executor count the same bytes."""

from __future__ import annotations

import itertools
from functools import cache

import numpy as np
import pytest

from hgc import compiler
from hgc.cluster import Cluster
from hgc.compiler import distribute_stages
from hgc.cost.exchange import exchange_s
from hgc.ir.program import Program
from hgc.ir.value import value
from hgc.passes.sharding.search.costs import _ACTION_S, ProgramBlocks
from hgc.passes.sharding.search.problem import Numbers
from hgc.plan import Plan, Stage
from hgc.runtime.executor_exchange import Side, exchange, side
from hgc.strategy import Strategy
from tests.distributed.pipelines import subject
from tests.passes.search.test_planner import measure

CLUSTER = Cluster.preset("a100-80", nodes=2, per_node=2)
STRATEGIES = [Strategy.parse(text) for text in ("dp4", "tp4 no-sequence-parallel", "dp2 tp2", "cp2 sp2")]
ROWS, MICRO_BATCHES = 8, 2
SHAPE = (ROWS // MICRO_BATCHES, 16, 64)
"""Hidden states of a micro-batch, in float32."""


@cache
def _program() -> Program:
    return subject("gpt2", ROWS).program


@cache
def _switches() -> Numbers:
    return ProgramBlocks(_program(), CLUSTER, measure).pipeline(STRATEGIES, 1, MICRO_BATCHES).switch_s


def _executed_s(plan: Plan) -> float:
    """Of a micro-batch, forward and backward, from the executor's own transfers."""
    first, second = distribute_stages(_program(), plan).stages
    (read,) = (node for node in second.inputs() if str(node.target) == first.results[0])
    maker, reader = (
        side(0, stage.mesh, {axis: str(placement) for axis, placement in value(node).placements})
        for stage, node in ((first, first.outputs()[0]), (second, read))
    )
    return _sent_s(maker, reader) + _sent_s(reader, maker, gradient=True)


def _sent_s(source: Side, target: Side, gradient: bool = False) -> float:
    sent = np.zeros((4, 4))
    for transfer in exchange(source, target, SHAPE, gradient):
        sent[transfer.source, transfer.target] += 4 * transfer.numel * (transfer.source != transfer.target)
    return exchange_s(CLUSTER, 0, 0, sent)


@pytest.mark.parametrize(("before", "after"), list(itertools.permutations(STRATEGIES, 2)), ids=str)
def test_all_three_agree(before: Strategy, after: Strategy) -> None:
    plan = Plan(stages=(Stage(2, 0, before), Stage(3, 0, after)), micro_batches=MICRO_BATCHES)
    executed_s = _executed_s(plan)
    assert _switches()[STRATEGIES.index(before), STRATEGIES.index(after)] == pytest.approx(2 * _ACTION_S + executed_s)
    parts = compiler.simulate(_program(), plan, CLUSTER).timeline.parts[0]
    found = next((axis.total_s for axis in parts.communication if axis.name == "pp"), 0.0)
    assert found == pytest.approx(MICRO_BATCHES * executed_s)

"""From programs to predictions: sums that must agree with the costs, what overlaps, what travels, memory, and bad requests."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from hgc.backends.simulator import Options, Simulation, StageProgram, simulate
from hgc.cluster import Cluster
from hgc.compiler import distribute
from hgc.cost.collectives import place, time_s
from hgc.cost.execution import EAGER, Execution
from hgc.cost.places import axis_places, group_place
from hgc.cost.stage_time import StageTimes
from hgc.cost.traffic import traffic, traffic_s
from hgc.errors import ClusterError, HgcError
from hgc.passes.sharding.even_stages import even_stages
from hgc.plan import Plan, Precision, Stage
from hgc.simulation import stage_programs
from hgc.strategy import Strategy
from tests.cost.small import traced

_PRESET = Cluster.preset("a100-80", nodes=2)
_NODE = replace(_PRESET.nodes[0], device=replace(_PRESET.nodes[0].device, deviation=0.0))
CLUSTER = replace(_PRESET, nodes=(_NODE,) * len(_PRESET.nodes))
"""Devices are equal, so that the number of them does not change their pace."""
SIZES = {"b": 32.0, "s": 256.0}


def plan_of(text: str, places: int = 1, schedule: str = "1f1b", virtual: int = 1, **options: object) -> Plan:
    strategy = Strategy.parse(text)
    stages = even_stages(traced("llama")[1], places, strategy, virtual, schedule == "zbv") if places * virtual > 1 else ()
    return replace(Plan(strategy, stages=stages, schedule=schedule), **options)  # type: ignore[arg-type]


@cache
def lowered(strategy: Strategy, blocks: tuple[int, ...]) -> tuple[StageProgram, ...]:
    stages = tuple(Stage(count, index * strategy.devices) for index, count in enumerate(blocks))
    return stage_programs(traced("llama")[1], Plan(strategy, stages), distribute, SIZES)


def stages_of(plan: Plan) -> tuple[StageProgram, ...]:
    """Neither ZeRO nor the schedule changes the programs."""
    return lowered(replace(plan.strategy, zero=0), tuple(stage.blocks for stage in plan.stages))


def run(plan: Plan, execution: Execution = EAGER, optimizer: str = "none", cluster: Cluster = CLUSTER, clip: bool = False) -> Simulation:
    return simulate(stages_of(plan), plan, cluster, SIZES, Options(optimizer, clip, execution))


def test_one_device_takes_the_time_of_its_blocks() -> None:
    plan = plan_of("dp1", micro_batches=2)
    (stage,) = stages_of(plan)
    times = StageTimes(stage.costs, plan.strategy, Precision())({"b": 16.0, "s": 256.0}, CLUSTER.nodes[0].device, {})
    expected = sum(times[block.body].forward_s + times[block.body].backward_s for block in stage.program.blocks())
    found = run(plan)
    added = [event.end_s - event.begin_s for event in found.timeline.events[0] if event.name == "add gradients"]
    assert len(added) == 1  # the second micro-batch's to the first's
    assert found.step_s == pytest.approx(2 * expected + added[0])
    assert found.parts.compute_s == pytest.approx(found.step_s)
    with_optimizer = run(plan, optimizer="adamw")
    assert with_optimizer.parts.optimizer_s > 0
    assert with_optimizer.step_s == pytest.approx(found.step_s + with_optimizer.parts.optimizer_s)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_what_the_runtime_sends_is_all_there(zero: int) -> None:
    """All collectives over dp: those of the graph, and those that ``hgc.cost.traffic`` lists for the runtime."""
    plan = plan_of(f"dp4 zero{zero}" if zero else "dp4", micro_batches=2)
    (stage,) = stages_of(plan)
    mesh = stage.program.mesh
    times = StageTimes(stage.costs, plan.strategy)({"b": 16.0, "s": 256.0}, CLUSTER.nodes[0].device, axis_places(CLUSTER, mesh))
    in_graph = sum(
        segment.seconds
        for block in stage.program.blocks()
        for segment in (*times[block.body].forward, *times[block.body].backward)
        if segment.collective
    )
    listed = traffic(stage.program, plan.strategy)
    sent = traffic_s(listed, lambda axes: group_place(CLUSTER, mesh, axes), micro_batches=2)
    assert sent > 0
    assert run(plan).parts.on("dp").total_s == pytest.approx(2 * in_graph + sent)


def test_parameters_are_gathered_one_unit_ahead_on_a_gpu_and_in_line_on_a_cpu() -> None:
    plan = plan_of("dp4 zero3")
    on_gpu = run(plan)
    gathers = [event for event in on_gpu.timeline.events[0] if event.name.startswith("gather model.layers")]
    forward = {event.name: event for event in reversed(on_gpu.timeline.events[0]) if event.row == "compute"}
    assert [event.name for event in gathers[:3]] == [f"gather model.layers.{number}" for number in range(3)]
    assert gathers[1].begin_s <= forward["model.layers.0"].begin_s + 1e-9  # while the one before runs
    assert len(gathers) == 6  # forward and backward
    slow = run(plan, cluster=Cluster.local(4))
    loss = [event for event in slow.timeline.events[0] if event.name.startswith("all_reduce")][-1]  # backward does not read it
    assert slow.parts.on("dp").exposed_s == pytest.approx(slow.parts.on("dp").total_s - (loss.end_s - loss.begin_s))
    packs = [event for event in slow.timeline.events[0] if event.name == "pack model.layers.0"]
    assert len(packs) == 5  # into and out of a gather's buffers, twice; into a scatter's
    assert not [event for event in on_gpu.timeline.events[0] if event.name.startswith("pack")]


def test_tensor_parallel_traffic_is_exposed_unless_told() -> None:
    plan = plan_of("tp4 no-sequence-parallel")
    found = run(plan)
    assert found.parts.on("tp").exposed_s == pytest.approx(found.parts.on("tp").total_s)
    beside = run(plan, replace(EAGER, overlap_products=True))
    assert beside.parts.on("tp").total_s == pytest.approx(found.parts.on("tp").total_s)
    assert beside.step_s < found.step_s


def test_stages_send_activations_and_their_gradients() -> None:
    plan = plan_of("dp2", places=2, micro_batches=4)
    found = run(plan)
    bytes_ = SIZES["b"] / 4 / 2 * SIZES["s"] * 64 * 4  # a micro-batch, half of it, times hidden size in float32
    expected = time_s("send", bytes_, place(CLUSTER, (0, 2)))
    assert found.parts.on("pp").total_s == pytest.approx(4 * expected)  # each rank sends forward, or backward
    first, last = found.timeline.parts
    assert first.step_s == pytest.approx(found.step_s)
    assert last.step_s == pytest.approx(found.step_s)


def test_scatter_and_gather_of_messages() -> None:
    plan = plan_of("tp2 no-sequence-parallel", places=2, micro_batches=2)
    whole, split = run(plan), run(plan, replace(EAGER, scatter_gather=True))
    bytes_ = SIZES["b"] / 2 * SIZES["s"] * 64 * 4
    pair = place(CLUSTER, (0, 2))
    assert whole.parts.on("pp").total_s == pytest.approx(2 * time_s("send", bytes_, pair))
    assert split.parts.on("pp").total_s == pytest.approx(2 * time_s("send", bytes_ / 2, pair))
    gathered = 2 * time_s("all_gather", bytes_, group_place(CLUSTER, {"tp": 2}, ("tp",)))
    assert split.parts.on("tp").total_s == pytest.approx(whole.parts.on("tp").total_s + gathered)


def test_blocking_sends_cost_time() -> None:
    plan = plan_of("dp2", places=2, micro_batches=4)
    assert run(plan, replace(EAGER, sends_block=True)).step_s > run(plan).step_s


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_every_schedule_is_simulated(schedule: str) -> None:
    virtual = 2 if schedule in ("interleaved", "zbv") else 1
    plan = plan_of("dp2 zero2", places=4 // virtual, virtual=virtual, schedule=schedule, micro_batches=4)
    found = run(plan, optimizer="adamw", clip=True)
    assert found.parts.step_s == pytest.approx(found.step_s)
    assert found.parts.on("all ranks").total_s > 0
    assert found.parts.bubble_s > 0
    plain = run(plan_of("dp2 zero2", places=4, micro_batches=4))
    assert found.parts.compute_s * 4 / virtual == pytest.approx(4 * plain.parts.compute_s)  # the same work on fewer places


def test_memory_counts_what_is_in_flight() -> None:
    plan = plan_of("dp2", places=4, micro_batches=8)
    few, all_ = run(plan), run(replace(plan, schedule="gpipe"))
    first, other = few.memory[0], all_.memory[0]
    assert other.term("activations") == pytest.approx(2 * first.term("activations"))  # 8 instead of 4
    assert few.memory[3].term("activations") * 8 == pytest.approx(all_.memory[3].term("activations"))
    assert few.peak_bytes == pytest.approx(first.total)
    virtual = run(plan_of("dp2", places=2, virtual=2, schedule="zbv", micro_batches=4))
    assert virtual.peak_bytes < virtual.memory[0].total + virtual.memory[3].total  # the driver's share and workspaces are there once


def test_stages_that_are_alike_are_measured_once() -> None:
    stages = stages_of(plan_of("dp2", places=4))
    assert len({id(stage.costs) for stage in stages}) == 3  # embedding and a layer, a layer, a layer, head
    assert stages[1].costs is stages[2].costs
    assert stages[1].results == stages[2].received != stages[1].received


def test_a_slower_cluster_takes_longer() -> None:
    plan = plan_of("dp4")
    assert run(plan, cluster=Cluster.preset("v100-32")).step_s > run(plan).step_s


def test_the_table_is_short_and_says_it_all() -> None:
    text = str(run(plan_of("tp2 no-sequence-parallel", places=2, micro_batches=2), optimizer="adamw"))
    lines = text.splitlines()
    assert len(lines) < 20
    assert "on 4 devices, 2 micro-batches, 1f1b" in lines[0]
    for word in ("compute", "waiting for tp", "waiting for pp", "bubble", "memory", "activations"):
        assert sum(line.strip().startswith(word) for line in lines) == 1, word


def test_bad_requests() -> None:
    plan = plan_of("dp4")
    stages = stages_of(plan)
    with pytest.raises(HgcError, match="the program has no size 'batch'; it has b, s"):
        simulate(stages, plan, CLUSTER, {"batch": 4})
    with pytest.raises(ClusterError, match="the plan needs 32 devices, the cluster has 16"):
        simulate(stages, replace(plan, strategy=Strategy(dp=32)), CLUSTER)
    with pytest.raises(HgcError, match="the plan has 2 stages, 1 programs were given"):
        simulate(stages, plan_of("dp4", places=2), CLUSTER)
    with pytest.raises(HgcError, match="the optimizer 'adm' is not known"):
        simulate(stages, plan, CLUSTER, options=Options("adm"))

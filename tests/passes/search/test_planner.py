"""The search on real programs: its numbers against the simulator, pins, bad input, and its plans on ranks that are threads."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hgc import compiler
from hgc.automatic import automatic
from hgc.cluster import Cluster
from hgc.compiler import search_planner
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import PlanError
from hgc.ir.program import Program
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.judged import Judged
from hgc.passes.sharding.search.pipeline import measured
from hgc.passes.sharding.search.planner import SearchPlanner, _simplest
from hgc.plan import Plan, Prediction, Stage
from hgc.simulation import stage_programs
from hgc.strategy import Strategy
from tests.distributed.pipelines import check_parity, subject


@cache
def _program(family: str) -> Program:
    return subject(family).program


def measure(program: Program, plan: Plan) -> tuple[Program, ProgramCosts]:
    (found,) = stage_programs(program, plan, compiler.distribute)
    return found.program, found.costs


def _small(cluster: Cluster, memory_bytes: int) -> Cluster:
    nodes = tuple(replace(node, device=replace(node.device, memory_bytes=memory_bytes)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes)


@pytest.mark.parametrize("strategy", ["dp4", "dp4 zero3", "dp2 tp2 zero1 recompute"])
def test_numbers_against_the_simulator(strategy: str) -> None:
    """Memory of blocks added up is that of the whole program, and time that of its step, roughly: the simulator decides later."""
    chosen, cluster = Strategy.parse(strategy), Cluster.local(4)
    blocks = ProgramBlocks(_program("llama"), cluster, measure)
    assert blocks.usable([chosen]) == (chosen,)
    problem = blocks.pipeline([chosen], stages=1, micro_batches=1)
    found = measured(problem, 0, 0, (0,) * problem.blocks)
    wanted = compiler.simulate(_program("llama"), Plan(chosen), cluster)
    assert found.memory == pytest.approx(wanted.peak_bytes, rel=0.35)
    assert found.whole_s == pytest.approx(wanted.step_s, rel=0.35)


def test_blocks_alike_are_measured_once() -> None:
    blocks = ProgramBlocks(_program("llama"), Cluster.local(2), measure)
    assert blocks.kinds == (0, 1, 1, 1, 4)
    asked = []

    def counting(program: Program, plan: Plan) -> tuple[Program, ProgramCosts]:
        asked.append(program.name)
        return measure(program, plan)

    counted = replace(blocks, measure=counting, _lowered={}, _numbers={})
    counted.pipeline([Strategy(dp=2), Strategy(dp=2, zero=3), Strategy(dp=2, recompute="full")], 1, 1)
    counted.pipeline([Strategy()], 2, 2)
    assert len(asked) == 3


def test_what_memory_forces() -> None:
    """Plenty: no ZeRO, nothing computed twice. Less: one of them. Too little: the sentence names about what would do."""
    program, cluster = _program("gpt2"), Cluster.local(2)
    planner = search_planner(fix=(("pp", 1), ("tp", 1)))
    usual = planner.run(program, cluster)
    assert usual.strategy == Strategy(dp=2)
    peak = usual.predicted.memory_bytes
    assert peak
    tight = planner.run(program, _small(cluster, int(peak * 0.85)))
    assert tight.strategies != usual.strategies
    assert tight.predicted.memory_bytes <= peak * 0.85  # type: ignore[operator]
    with pytest.raises(PlanError, match=r"no plan with pp=1, tp=1 fits .* on each of 2 devices; about [\d.]+ MiB.* would do") as caught:
        planner.run(program, _small(cluster, int(peak * 0.2)))
    enough = float(str(caught.value).split("about ")[1].split(" ")[0]) * 2**20
    assert peak * 0.2 < enough < peak


def test_pins() -> None:
    program, cluster = _program("llama"), Cluster.local(4)
    plan = search_planner(fix=(("tp", 2), ("pp", 2)), forbid=(("micro_batches", 2),)).run(program, cluster)
    assert {stage.first_rank for stage in plan.stages} == {0, 2}
    assert {strategy.tp for strategy in plan.strategies} == {2}
    assert plan.micro_batches == 4


def test_fewer_rows_than_devices_need_sequence_axes() -> None:
    """Two rows on four devices, in one stage without tensor parallelism."""
    plan = search_planner(fix=(("pp", 1), ("tp", 1))).run(subject("llama", 2).program, Cluster.local(4))
    assert plan.strategy.dp * plan.strategy.cp * plan.strategy.sp == 4
    assert plan.strategy.dp <= 2


def test_blocks_differ_where_memory_binds(tmp_path: Path) -> None:
    """Between what all blocks keep and what they keep with ZeRO or recomputation, some of them do and some do not; and that runs."""
    given, cluster = subject("llama"), Cluster.local(2)
    planner = search_planner(fix=(("pp", 1), ("tp", 1), ("micro_batches", 1)))
    peak = planner.run(given.program, cluster).predicted.memory_bytes
    assert peak
    plans = [planner.run(given.program, _small(cluster, int(peak * share))) for share in (0.9, 0.8)]
    different = [plan for plan in plans if len(set(plan.strategies)) > 1]
    assert different
    assert {stage.first_rank for stage in different[0].stages} == {0}
    check_parity(given, lambda _: different[0], tmp_path / "out")


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_plans_run(family: str, tmp_path: Path) -> None:
    """Plans for four devices train as the model on one: the best, and the best with two stages."""
    program, cluster = _program(family), Cluster.local(4)
    plan = search_planner(fix=(("pp", 2),)).run(program, cluster)
    assert {stage.first_rank for stage in plan.stages} == {0, 2}
    check_parity(subject(family), lambda _: plan, tmp_path / "out")


def test_shared_lowering_changes_nothing() -> None:
    known: dict[tuple[str, str], object] = {}
    program, plan = _program("llama"), Plan(Strategy(dp=2))
    first = stage_programs(program, plan, compiler.distribute, known=known)  # type: ignore[arg-type]
    again = stage_programs(program, replace(plan, micro_batches=2), compiler.distribute, known=known)  # type: ignore[arg-type]
    assert again[0].costs is first[0].costs
    assert len(known) == 1


def test_simple_plans_win_ties() -> None:
    """A plan in stages has to be faster by more than predictions can tell."""
    plain, staged = Plan(Strategy(dp=2)), Plan(stages=(Stage(1, 0), Stage(1, 1)))
    for staged_s, wanted in ((0.998, plain), (0.9, staged)):
        judged = [Judged(plain, Prediction(1.0)), Judged(staged, Prediction(staged_s))]
        assert _simplest(judged).plan is wanted


def test_a_planner_is_a_plan_for_compile() -> None:
    import hgc
    from tests.families import FAMILIES

    model, batch = FAMILIES["llama"]()
    compiled = hgc.compile(model, batch, cluster=Cluster.local(2), plan=search_planner(fix=(("pp", 1), ("dp", 2), ("zero", 3))).run)
    assert compiled.plan.strategy.zero == 3


def test_auto_without_a_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the search fails the uniform plan is taken if it fits in simulation, with the reason; else the search's error stands."""

    def fails(self: SearchPlanner, program: Program, cluster: Cluster) -> Plan:
        raise PlanError("blocks cannot be told apart")

    monkeypatch.setattr(SearchPlanner, "run", fails)
    plan = automatic(_program("llama"), Cluster.local(2), search_planner())
    assert plan.notes[-1] == "the search found no plan: blocks cannot be told apart"
    assert plan.predicted.basis == "simulated"
    with pytest.raises(PlanError, match="blocks cannot be told apart"):
        automatic(_program("llama"), _small(Cluster.local(2), plan.predicted.memory_bytes - 1), search_planner())  # type: ignore[operator]

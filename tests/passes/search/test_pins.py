"""What users fix and forbid: words, contradictions, what no plan can have; and the time limit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count

import pytest

import hgc
from hgc.cluster import Cluster
from hgc.compiler import search_planner
from hgc.errors import PlanError
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.judged import Searched
from hgc.passes.sharding.search.pins import Pins, parse_pins
from hgc.passes.sharding.search.planner import SearchPlanner
from hgc.strategy import Strategy
from tests.distributed.pipelines import subject
from tests.families import FAMILIES


@cache
def _blocks(devices: int) -> ProgramBlocks:
    """Of a program that all tests share, so that it is measured once."""
    return ProgramBlocks(subject("llama").program, Cluster.local(devices), search_planner().measure)


@cache
def _planner() -> SearchPlanner:
    return search_planner()


def _search(devices: int = 4, **options: object) -> Searched:
    return replace(_planner(), **options).search(_blocks(devices))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fix", "forbid", "said"),
    [
        ({"ep": 2}, {}, "a plan has no 'ep' to fix"),
        ({}, {"stages": 2}, "a plan has no 'stages' to forbid"),
        ({"tp": 0}, {}, "fix has tp=0; expected a whole number of 1 or more"),
        ({"tp": "two"}, {}, "fix has tp='two'; expected a whole number"),
        ({"zero": 5}, {}, "fix has zero=5; expected one of 0, 1, 2, 3"),
        ({"recompute": "some"}, {}, "expected one of none, selective, full"),
        ({"schedule": "zbv"}, {}, "expected one of gpipe, 1f1b, interleaved, zb-h1"),
        ({"tp": 2}, {"tp": [2, 4]}, "tp is fixed to 2 and forbidden to be that; drop one of the two"),
        ({"dp": 3}, {}, "dp is fixed to 3, which does not divide 4 devices; use one of 1, 2, 4"),
        ({"pp": 2, "tp": 4}, {}, "fix asks for pp=2 x tp=4, 8 devices, the cluster has 4; drop one of them"),
        ({"pp": 1, "dp": 1, "cp": 1, "sp": 1, "tp": 2}, {}, "2 devices, the cluster has 4"),
        ({"micro_batches": 3}, {}, "micro_batches is fixed to 3, which does not divide the batch of 4"),
        ({"tp": 4}, {"zero": 0}, "no plan with tp=4, not zero=0 runs .*: drop tp=4 or not zero=0"),
        ({"tp": 4, "zero": 3}, {}, "drop tp=4 or zero=3"),
        ({"pp": 4}, {"micro_batches": [4]}, "drop pp=4 or not micro_batches=4"),
    ],
)
def test_what_cannot_be_is_named(fix: dict[str, object], forbid: dict[str, object], said: str) -> None:
    with pytest.raises(PlanError, match=said):
        _search(fix=fix, forbid=forbid)


def test_more_stages_than_blocks() -> None:
    with pytest.raises(PlanError, match="pp is fixed to 8, but the program has 5 blocks; use at most 5"):
        Pins.of({"pp": 8}, {}).check(devices=8, blocks=5, batch=8)


@pytest.mark.parametrize(
    ("fix", "forbid"),
    [
        ({"tp": 2}, {}),
        ({"zero": [2, 3], "tp": 1}, {}),
        ({"pp": 2}, {"recompute": ["none", "selective"]}),
        ({"micro_batches": 2}, {"pp": [1, 4]}),
        ({"pp": 2, "schedule": "gpipe"}, {}),
        ({}, {"dp": [2, 4], "tp": [2, 4]}),
    ],
)
def test_plans_obey(fix: dict[str, object], forbid: dict[str, object]) -> None:
    """All that the judge saw, not only the best."""
    pins = Pins.of(fix, forbid)
    for each in _search(fix=fix, forbid=forbid).judged:
        assert all(map(pins.allow, each.plan.strategies))
        places = len({stage.first_rank for stage in each.plan.stages}) or 1
        assert pins.allows("pp", places)
        assert pins.allows("micro_batches", each.plan.micro_batches)
        assert places == 1 or pins.allows("schedule", each.plan.schedule)


def test_words() -> None:
    assert parse_pins("fix", ["tp=2", "zero=0,3", "sequence-parallel=no", "recompute=full"]) == {
        "tp": [2],
        "zero": [0, 3],
        "sequence_parallel": [False],
        "recompute": ["full"],
    }
    assert parse_pins("forbid", ["tp=2", "tp=4"]) == {"tp": [2, 4]}
    with pytest.raises(PlanError, match="'tp' pins nothing; write for example --fix tp=2"):
        parse_pins("fix", ["tp"])
    assert str(Pins.of({"zero": [0, 3]}, {"tp": 4})) == "zero=0 or 3, not tp=4"


def test_compile_takes_pins() -> None:
    model, batch = FAMILIES["llama"]()
    compiled = hgc.compile(model, batch, cluster=Cluster.local(2), fix={"tp": 2, "pp": 1})
    assert set(compiled.plan.strategies) <= {replace(each, tp=2, dp=1) for each in compiled.plan.strategies}
    with pytest.raises(PlanError, match='fix is for plan="auto", but plan is'):
        hgc.compile(model, batch, plan="dp2", fix={"tp": 2})


def _ticking(step_s: float) -> Iterator[float]:
    return (index * step_s for index in count())


def test_time_limit() -> None:
    """At once late: one graph is measured, a plan that fits is found, notes say what was left out. With time: as without a limit."""
    usual = _search()
    clock = _ticking(1.0)
    hurried = replace(search_planner(), time_limit_s=0.5, clock=lambda: next(clock)).run(_blocks(4).program, Cluster.local(4))
    assert hurried.predicted.step_s >= usual.best.step_s * 0.999  # type: ignore[operator]
    assert any("the time limit of 0.5 s ended the search" in note and "were not measured" in note for note in hurried.notes)
    assert {strategy.tp for strategy in hurried.strategies} == {1}
    patient = _search(time_limit_s=1e6)
    assert patient.best.plan == usual.best.plan
    assert patient.unmeasured == 0


def test_time_limit_keeps_the_bound() -> None:
    """Problems that were not searched count in the bound, so that the gap holds."""
    from hgc.passes.sharding.search.hybrid import search

    blocks = _blocks(4)
    problems = [blocks.pipeline(blocks.usable([Strategy(dp=4 // stages)]), stages, 1) for stages in (1, 2, 4)]
    whole, stopped = search(problems, margin=10.0), search(problems, margin=10.0, is_late=lambda: True)
    assert (stopped.searched, stopped.left_out, whole.searched) == (1, 2, 3)
    assert stopped.lower_bound_s <= whole.found[0].plan.step_s
    assert stopped.gap >= 0


def test_batch_statistics_allow_one_micro_batch() -> None:
    """Normalisation over the batch is another function of each micro-batch: such plans are refused, and not searched."""
    from hgc import compiler
    from hgc.errors import ShardingError
    from hgc.plan import Plan

    program = subject("cnn").program
    with pytest.raises(ShardingError, match="statistics of the whole batch, which none of 2 micro-batches has; use 1 micro-batch"):
        compiler.distribute(program, Plan(Strategy(dp=2), micro_batches=2))
    assert compiler.distribute(program, Plan(Strategy(dp=2)))
    assert search_planner().run(program, Cluster.local(2)).micro_batches == 1

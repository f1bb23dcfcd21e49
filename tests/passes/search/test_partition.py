"""Cuts: balanced ones and the best against all cuts; BMW's walk, its rules and its degrees."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from hgc.passes.sharding.search.hybrid import search
from hgc.passes.sharding.search.partition import (
    balance,
    balance_degree,
    balanced,
    best_cuts,
    bmw,
    cut_bound_s,
    memory_balanced,
    time_balanced,
    walk_then_all,
)
from hgc.passes.sharding.search.pipeline import Arrival, Pipeline, Stages, alike, lower_bound_s, measured, mixed, quick_bound_s
from hgc.schedule import make
from hgc.tools.bench.search_problems import layer, problem


def _all_cuts(blocks: int, stages: int) -> Iterator[tuple[int, ...]]:
    for borders in itertools.combinations(range(1, blocks), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *borders, blocks)))


def _random(seed: int, stages: int = 3, blocks: int = 7, skips: bool = False) -> Pipeline:
    """``skips``: parts that take turns, messages between neighbours, values that skip blocks, devices of unlike pace and memory."""
    draw = np.random.default_rng(seed)
    shape = blocks, 3
    micro_s, saved = draw.uniform(1, 4, shape), draw.uniform(0, 3, shape)
    state = draw.uniform(0, 4, shape)
    limit = float(draw.uniform(0.45, 1.4) * (state.mean() + 2 * saved.mean()) * blocks / stages)
    return Pipeline(
        micro_s,
        draw.uniform(0, 1, shape),
        state,
        saved,
        draw.uniform(0, 1, shape),
        draw.uniform(0, 0.5, (3, 3)) * (1 - np.eye(3)),
        stages,
        int(draw.integers(1, 9)),
        limit,
        tuple(range(blocks)),
        int(draw.integers(1, 4)) if skips else 1,
        _arrivals(draw, blocks) if skips else (),
        tuple(draw.uniform(1, 2, stages)) if skips else (),
        tuple(draw.uniform(1, 1.5, stages)) if skips else (),
    )


def _arrivals(draw: np.random.Generator, blocks: int) -> tuple[Arrival, ...]:
    near = [Arrival(maker, (maker + 1,), draw.uniform(0, 1, 3), np.zeros(3), maker) for maker in range(blocks - 1)]
    return (*near, Arrival(0, (2, 4, 5), draw.uniform(0, 1, 3), draw.uniform(0, 1, 3), blocks))


def _heaviest(loads: np.ndarray, cuts: Sequence[int]) -> float:
    borders = [0, *itertools.accumulate(cuts)]
    return max(float(loads[stage, a:b].sum()) for stage, (a, b) in enumerate(itertools.pairwise(borders)))


@pytest.mark.parametrize("seed", range(20))
def test_balanced_is_the_lightest_of_all_cuts(seed: int) -> None:
    draw = np.random.default_rng(seed)
    blocks, stages = int(draw.integers(4, 9)), int(draw.integers(1, 5))
    loads = draw.uniform(0, 5, (stages, blocks))
    cuts = balanced(loads)
    assert sum(cuts) == blocks
    assert min(cuts) >= 1
    assert _heaviest(loads, cuts) == pytest.approx(min(_heaviest(loads, each) for each in _all_cuts(blocks, stages)))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("choose", [mixed, alike])
def test_best_cuts_equal_trying_all(choose: object, skips: bool) -> None:
    """With and without BMW's walk in front; what does not fit does not fit; the bound holds; the walk is never better."""
    nothing = walk_worse = by_cuts = 0
    for seed in range(40):
        given = _random(seed, skips=skips)
        stages = Stages(given, choose)  # type: ignore[arg-type]
        plans = [plan for cuts in _all_cuts(given.blocks, given.stages) if (plan := stages.plan(cuts)) is not None]
        found, both, walked = best_cuts(given, stages), walk_then_all(given, stages), bmw(given, stages).best
        if not plans:
            assert (found, both, walked) == (None, None, None)
            nothing += 1
            continue
        wanted = min(plan.step_s for plan in plans)
        assert found is not None
        assert both is not None
        assert found.step_s == pytest.approx(wanted)
        assert both.step_s == pytest.approx(wanted)
        assert max(lower_bound_s(given), cut_bound_s(given, stages)) <= wanted * (1 + 1e-9)
        assert quick_bound_s(given) <= lower_bound_s(given) * (1 + 1e-9)
        assert quick_bound_s(given) >= lower_bound_s(given) * 0.6
        by_cuts += cut_bound_s(given, stages) > lower_bound_s(given) * (1 + 1e-6)
        assert all(stage.memory <= given.limit_of(index) for index, stage in enumerate(found.stages))
        if walked is None or walked.step_s > wanted * (1 + 1e-9):
            walk_worse += 1
        assert walked is None or walked.step_s >= wanted * (1 - 1e-9)
        assert best_cuts(given, stages, below_s=wanted) is None
    assert 0 < nothing < 30
    assert by_cuts > 5
    assert walk_worse, "cuts that a walk of single blocks does not reach"


def test_values_that_skip_blocks() -> None:
    """Made by block 0, read by blocks 2 and 3: a message for each stage with a reader behind the maker's, held once a stage."""
    ones, none = np.ones((5, 1)), np.zeros((5, 1))
    skip = Arrival(0, (2, 3), np.array([10.0]), np.array([7.0]), 0)
    near = Arrival(1, (2,), np.array([0.5]), np.zeros(1), 1)
    given = Pipeline(ones, none, none, none, none, np.zeros((1, 1)), 2, 4, 1e9, (0,) * 5, arrivals=(skip, near))

    def times(*cuts: int) -> list[tuple[float, float]]:
        starts = (0, *itertools.accumulate(cuts))
        stages = [measured(given, stage, starts[stage], (0,) * blocks) for stage, blocks in enumerate(cuts)]
        return [(stage.micro_s, stage.memory) for stage in stages]

    assert times(2, 3) == [(2.0, 0.0), (3.0 + 10 + 0.5, 7.0)]
    assert times(3, 2) == [(3.0, 2 * 7.0), (2.0 + 10, 7.0)]
    assert times(4, 1) == [(4.0, 2 * 7.0), (1.0, 0.0)]


def test_parts_that_take_turns() -> None:
    """Equal stages: a pipeline of P stages in v parts takes m * n + (P - 1) * n / v, and the first holds 2 P - 1 + (v - 1) P parts."""
    ones, none = np.ones((8, 1)), np.zeros((8, 1))
    for virtual in (1, 2):
        given = Pipeline(ones, none, none, ones, none, np.zeros((1, 1)), 4, 8, 1e9, (0,) * 8, virtual)
        plan = Stages(given).plan((2, 2, 2, 2))
        assert plan is not None
        assert plan.step_s == pytest.approx(8 * 2 + 3 * 2 / virtual)
        assert plan.stages[0].memory == 2 * (4 if virtual == 1 else (2 * 3 + 4 + 1) / 2)


@pytest.mark.parametrize("virtual", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 4])
def test_micro_batches_in_flight_are_the_schedules(stages: int, virtual: int) -> None:
    """What the lists of actions have alive at once on each place, in parts."""
    ones = np.ones((stages * virtual, 1))
    given = Pipeline(ones, 0 * ones, ones, ones, ones, np.zeros((1, 1)), stages, 3 * stages, 1e9, (0,) * len(ones), virtual)
    name = "interleaved" if virtual > 1 else "1f1b"
    schedule = make(name, [range(stage % stages, stage % stages + 1) for stage in range(len(ones))], 3 * stages)
    for place, ranks in enumerate(schedule.groups):
        steps = [{"F": 1, "B": -1}.get(action.kind, 0) for action in schedule.lists[ranks[0]]]
        assert max(itertools.accumulate(steps)) == given.in_flight(place) * virtual


def test_memory_skew_of_1f1b() -> None:
    """Early stages hold more micro-batches, so balanced memory gives them fewer layers, and balanced time as many."""
    given = problem((layer(1280, 512, 6e12),) * 32, 8, 4, 64, 16, 1e12)
    choices = (0,) * 32
    assert time_balanced(given, choices) == (8, 8, 8, 8)
    by_memory = memory_balanced(given, choices)
    assert list(by_memory) == sorted(by_memory)
    assert by_memory[0] < 8 < by_memory[-1]


def test_walk_goes_from_memory_to_time() -> None:
    """It begins at the memory-balanced cut, moves one block at a time, and its degrees lie between those of the two cuts."""
    base = problem((layer(1280, 512, 6e12),) * 32, 8, 4, 64, 16, 0.0)
    limit = float(base.memory(0).min(axis=1).sum())
    given = problem((layer(1280, 512, 6e12),) * 32, 8, 4, 64, 16, limit)
    walk = bmw(given)
    assert walk.best is not None
    assert len(walk.tried) > 1
    assert len(set(walk.tried)) == len(walk.tried)
    for cuts in walk.tried[1:]:
        assert any(sum(abs(a - b) for a, b in zip(cuts, other, strict=True)) == 2 for other in walk.tried)
    degrees = balance(walk.best, given)
    assert degrees.time_of_memory_balanced - 1e-9 <= degrees.time <= 0.75
    assert degrees.memory <= 0.75
    first = Stages(given).plan(walk.tried[0])
    assert first is None or walk.best.step_s <= first.step_s


def test_balance_degree() -> None:
    assert balance_degree([1, 1, 1, 1]) == 0.75
    assert balance_degree([0, 3, 0]) == 0.0


def test_outer_search_is_the_best_of_all() -> None:
    """Bounds leave problems out, never the best one."""
    layers = (layer(1280, 512, 6e12),) * 16
    problems = [problem(layers, 8, stages, 64, many, 6e9) for stages in (1, 2, 4, 8) for many in (1, 4, 16)]
    outcome = search(problems)
    alone = [plan.step_s for each in problems if (plan := walk_then_all(each, Stages(each))) is not None]
    assert outcome.found[0].plan.step_s == pytest.approx(min(alone))
    assert outcome.left_out > 0
    assert outcome.searched + outcome.left_out == len(problems)
    assert outcome.lower_bound_s <= min(alone)

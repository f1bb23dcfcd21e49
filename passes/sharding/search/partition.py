"""Where to cut a pipeline: balanced in time, balanced in memory, Galvatron-BMW's walk between the two, and the best of all cuts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hgc.passes.sharding.search.pipeline import (
    Cuts,
    Pipeline,
    PipelinePlan,
    StagePlan,
    Stages,
    measured,
    price_grid,
    reference_choices,
    spans,
    step_s,
)
from hgc.passes.sharding.search.problem import Numbers


def balanced(loads: Numbers) -> Cuts:
    """Cuts whose fullest stage is as light as possible, none of them empty. ``loads``: [stages, blocks], what a block adds to a stage."""
    stages, blocks = loads.shape
    total = np.concatenate([np.zeros((stages, 1)), loads.cumsum(axis=1)], axis=1)
    best = np.full(blocks + 1, np.inf)
    best[0] = 0.0
    starts = np.zeros((stages, blocks + 1), dtype=int)
    for stage in range(stages):
        after = np.full(blocks + 1, np.inf)
        for end in range(stage + 1, blocks - (stages - stage - 1) + 1):
            heaviest = np.maximum(best[:end], total[stage, end] - total[stage, :end])
            starts[stage, end] = int(heaviest.argmin())
            after[end] = heaviest[starts[stage, end]]
        best = after
    cuts, end = [], blocks
    for stage in range(stages - 1, -1, -1):
        cuts.append(end - int(starts[stage, end]))
        end = int(starts[stage, end])
    return tuple(cuts[::-1])


def time_balanced(problem: Pipeline, choices: Sequence[int]) -> Cuts:
    """By the time of a micro-batch under these strategies, on the devices of each stage."""
    loads = problem.micro_s[np.arange(problem.blocks), np.asarray(choices)]
    return balanced(np.array([loads * problem.pace_of(stage) for stage in range(problem.stages)]))


def memory_balanced(problem: Pipeline, choices: Sequence[int]) -> Cuts:
    """By memory under these strategies; early stages hold more micro-batches."""
    rows, chosen = np.arange(problem.blocks), np.asarray(choices)
    return balanced(np.array([problem.memory(stage)[rows, chosen] / problem.limit_of(stage) for stage in range(problem.stages)]))


def balance_degree(loads: Sequence[float]) -> float:
    """``1 - max / sum``: 0 where one stage has all, at most ``1 - 1 / P`` where all have the same (Galvatron-BMW, section 4)."""
    total = sum(loads)
    return 1 - max(loads) / total if total else 0.0


@dataclass(frozen=True)
class Balance:
    """Degrees of a plan, and those of the two cuts between which it lies."""

    time: float
    memory: float
    time_of_memory_balanced: float
    memory_of_time_balanced: float


def balance(plan: PipelinePlan, problem: Pipeline) -> Balance:
    """The other two cuts are measured with the plan's strategies."""
    by_memory = _with(problem, memory_balanced(problem, plan.choices), plan.choices)
    by_time = _with(problem, time_balanced(problem, plan.choices), plan.choices)
    return Balance(
        balance_degree([stage.micro_s for stage in plan.stages]),
        balance_degree([stage.memory for stage in plan.stages]),
        balance_degree([stage.micro_s for stage in by_memory]),
        balance_degree([stage.memory for stage in by_time]),
    )


def _with(problem: Pipeline, cuts: Cuts, choices: Sequence[int]) -> list[StagePlan]:
    """Stages of these cuts with strategies that are kept, whether they fit or not."""
    return [measured(problem, stage, start, choices[start:end]) for stage, (start, end) in enumerate(spans(cuts))]


@dataclass(frozen=True)
class Walk:
    """What the walk found, and the cuts that it tried, in order."""

    best: PipelinePlan | None
    tried: tuple[Cuts, ...]


def bmw(problem: Pipeline, stages: Stages | None = None) -> Walk:
    """Galvatron-BMW's walk from the memory-balanced cuts towards the time-balanced ones (algorithm 2 of the paper).

    A cut's stages are planned each for itself, then the slowest one gives a block to a neighbour. The new cut is tried only if, with the
    strategies just found, (i) its slowest stage is not slower, (ii) all stages fit, and (iii) its fullest stage holds no more than that
    of the time-balanced cut. The walk ends when no cut is left. Where the memory-balanced cut itself does not fit, the time-balanced
    one is tried too.
    """
    stages = stages or Stages(problem)
    reference = reference_choices(problem)
    if reference is None:
        return Walk(None, ())
    by_memory, by_time = memory_balanced(problem, reference), time_balanced(problem, reference)
    waiting, tried, best = deque([by_memory]), list[Cuts](), None
    while waiting:
        cuts = waiting.popleft()
        tried.append(cuts)
        plan = stages.plan(cuts)
        if plan is None:
            waiting += [by_time] if not waiting and by_time not in tried else []
            continue
        best = plan if best is None or plan.step_s < best.step_s else best
        fullest = max(stage.memory for stage in _with(problem, by_time, plan.choices))
        for moved in _moved(plan):
            if moved not in tried and moved not in waiting and _is_worth(problem, plan, moved, fullest):
                waiting.append(moved)
    return Walk(best, tuple(tried))


def _moved(plan: PipelinePlan) -> list[Cuts]:
    """Cuts in which the slowest stage gives its first block to the stage before, or its last to the one behind."""
    slowest = max(range(len(plan.stages)), key=lambda stage: plan.stages[stage].micro_s)
    found = []
    for neighbour in (slowest - 1, slowest + 1):
        if 0 <= neighbour < len(plan.cuts) and plan.cuts[slowest] > 1:
            cuts = list(plan.cuts)
            cuts[slowest] -= 1
            cuts[neighbour] += 1
            found.append(tuple(cuts))
    return found


def _is_worth(problem: Pipeline, plan: PipelinePlan, cuts: Cuts, fullest: float) -> bool:
    stages = _with(problem, cuts, plan.choices)
    not_slower = max(stage.micro_s for stage in stages) <= max(stage.micro_s for stage in plan.stages) * (1 + 1e-9)
    most = max(stage.memory for stage in stages)
    fits = all(stage.memory <= limit for stage, limit in zip(stages, problem.limits, strict=True))
    return not_slower and fits and most <= fullest * (1 + 1e-9)


# -- all cuts ---------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Front:
    """Some stages: the longest micro-batch, the sum of the last ones, the stages."""

    longest_s: float
    sum_s: float
    stages: tuple[StagePlan, ...]


def best_cuts(problem: Pipeline, stages: Stages | None = None, below_s: float = math.inf) -> PipelinePlan | None:
    """The best of all cuts, given what ``stages`` plans for each; ``None`` if none fits, or none is faster than ``below_s``.

    Fronts of (longest micro-batch, sum of last ones) for each number of stages and of blocks; dominated ones, and those that
    cannot be faster than the best known, are dropped: before a stage is planned by what its blocks take at prices of memory.
    """
    if not np.isfinite(problem.micro_s).any(axis=1).all():
        return None  # a block that no strategy can run
    stages = stages or Stages(problem)
    fastest, priced = _Fastest(problem), _Priced(problem)
    fronts: dict[int, list[_Front]] = {0: [_Front(0.0, 0.0, ())]}
    for stage in range(problem.stages):
        nexts: dict[int, list[_Front]] = {}
        left = problem.stages - stage - 1
        for start, found in fronts.items():
            ends = range(start + 1, problem.blocks - left + 1) if left else [problem.blocks]
            for end in ends:
                least_s = priced.busy_s(stage, start, end) + fastest.rest_s(end) if math.isfinite(below_s) else 0.0
                alive = [front for front in found if max(front.sum_s + least_s, fastest.step_s(front, stage, start, end)) < below_s]
                planned = stages(stage, start, end) if alive else None
                if planned is None:
                    continue
                for front in alive:
                    grown = _Front(max(front.longest_s, planned.micro_s), front.sum_s + planned.whole_s, (*front.stages, planned))
                    if fastest.step_s(grown, stage + 1, end, end) < below_s:
                        nexts.setdefault(end, []).append(grown)
        fronts = {end: _undominated(found) for end, found in nexts.items()}
    plans = [PipelinePlan(front.stages, step_s(front.stages, problem.micro_batches)) for front in fronts.get(problem.blocks, [])]
    return min((plan for plan in plans if plan.step_s < below_s), key=lambda plan: plan.step_s, default=None)


def cut_bound_s(problem: Pipeline, stages: Stages) -> float:
    """What no cut undercuts, from the bounds of the stages that ``stages`` has planned.

    With ``n`` a micro-batch's time and ``c`` the last one's, a step takes at least ``(m - 1) * n + c`` of any stage (what it is busy, also
    where ``c`` is that of its last part) and the ``c`` of the others; so at least the sum of the least ``c`` of all blocks, and of the
    stage that is busiest what it is busy beyond its own.
    Stages that were not planned count by what their blocks take at prices of memory.
    """
    priced = _Priced(problem)
    micro_s = np.append(0.0, problem.micro_s.min(axis=1).cumsum())
    whole_s = np.append(0.0, (problem.micro_s / problem.virtual + problem.last_s).min(axis=1).cumsum())
    best = np.full(problem.blocks + 1, np.inf)
    best[0] = 0.0
    for stage in range(problem.stages):
        after = np.full(problem.blocks + 1, np.inf)
        for start in np.flatnonzero(np.isfinite(best)).tolist():
            for end in range(start + 1, problem.blocks - (problem.stages - stage - 1) + 1):
                fastest_s = problem.steady * (micro_s[end] - micro_s[start])
                busy_s = max(stages.bound_s(stage, start, end), priced.busy_s(stage, start, end)) - (whole_s[end] - whole_s[start])
                after[end] = min(after[end], max(best[start], fastest_s, busy_s))
        best = after
    return float(best[-1] + whole_s[-1])


class _Fastest:
    """Lower bounds from the fastest strategy of each block, memory and switches left out."""

    def __init__(self, problem: Pipeline) -> None:
        self._problem = problem
        self._micro = np.append(0.0, problem.micro_s.min(axis=1).cumsum())
        self._whole = np.append(0.0, (problem.micro_s / problem.virtual + problem.last_s).min(axis=1).cumsum())

    def rest_s(self, end: int) -> float:
        """What the last micro-batch takes in the blocks behind ``end``."""
        return float(self._whole[-1] - self._whole[end])

    def step_s(self, front: _Front, stage: int, start: int, end: int) -> float:
        """A step whose first stages are the front's, if blocks ``start`` to ``end`` are the next one (none if it is empty)."""
        behind = self._problem.stages - stage - (end > start)
        rest_s = (self._micro[-1] - self._micro[end]) / behind if behind else 0.0
        longest_s = max(front.longest_s, self._micro[end] - self._micro[start], rest_s)
        return float(self._problem.steady * longest_s + front.sum_s + self._whole[-1] - self._whole[start])


class _Priced:
    """Lower bounds of what any span of blocks is busy as a stage: each block chooses alone at a price of memory (Lagrangian duality)."""

    def __init__(self, problem: Pipeline) -> None:
        self._problem = problem
        self._busy_s = problem.micro_batches * problem.micro_s + problem.last_s
        self._prices = price_grid(self._busy_s, problem.memory(0))
        self._known: dict[float, tuple[Numbers, Numbers]] = {}

    def busy_s(self, stage: int, start: int, end: int) -> float:
        """Infinite if nothing fits."""
        alive = self._problem.in_flight(stage)
        if alive not in self._known:
            memory = np.where(np.isfinite(self._busy_s), self._problem.memory(stage), np.inf)
            lengths = np.array([(self._busy_s + price * np.where(np.isfinite(memory), memory, 0.0)).min(axis=1) for price in self._prices])
            least = memory.min(axis=1)
            self._known[alive] = np.pad(lengths.cumsum(axis=1), ((0, 0), (1, 0))), np.append(0.0, least.cumsum())
        lengths, least = self._known[alive]
        if least[end] - least[start] > self._problem.limit_of(stage) * (1 + 1e-9):
            return math.inf
        return float((lengths[:, end] - lengths[:, start] - self._prices * self._problem.limit_of(stage)).max())


def _undominated(fronts: list[_Front]) -> list[_Front]:
    kept: list[_Front] = []
    for front in sorted(fronts, key=lambda front: (front.longest_s, front.sum_s)):
        if not kept or front.sum_s < kept[-1].sum_s:
            kept.append(front)
    return kept


Search = Callable[[Pipeline, Stages, float], PipelinePlan | None]
"""``(problem, stages, below_s)``: a plan that is faster than that, if there is one."""


def walk_then_all(problem: Pipeline, stages: Stages, below_s: float = math.inf) -> PipelinePlan | None:
    """The best cuts; where nothing is known to be beaten BMW's walk comes first, so that most others need not be looked at."""
    if math.isfinite(below_s):
        return best_cuts(problem, stages, below_s)
    walked = bmw(problem, stages).best
    return best_cuts(problem, stages, walked.step_s if walked else math.inf) or walked

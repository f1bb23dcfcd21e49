"""A chain of blocks cut into pipeline stages: numbers of a problem, the plan of each stage, the time of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hgc.passes.sharding.search.problem import Chain, Numbers
from hgc.passes.sharding.search.solve import TOLERANCE, solve

Cuts = tuple[int, ...]
"""Blocks of each stage."""


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Blocks of a program for one number of stages and of micro-batches, in the order 1F1B.

    Stage ``i`` of ``P`` holds what ``min(P - i, micro_batches)`` micro-batches save. All stages have as many devices, and ``limit``
    of memory.

    Args:
        micro_s: [blocks, strategies], forward and backward of one micro-batch; infinite where a block cannot have a strategy.
        last_s: [blocks, strategies], what the last micro-batch takes longer (gradients are summed over ranks).
        state: [blocks, strategies], memory whatever is in flight; ``saved``: for each micro-batch in flight; ``passing``: of the
            running block only, the largest of a stage counts.
        switch_s: [strategies, strategies], a micro-batch between unlike neighbours of a stage.
        kinds: of each block; those of one kind have the same numbers.
    """

    micro_s: Numbers
    last_s: Numbers
    state: Numbers
    saved: Numbers
    passing: Numbers
    switch_s: Numbers
    stages: int
    micro_batches: int
    limit: float
    kinds: tuple[int, ...]

    @property
    def blocks(self) -> int:
        return len(self.kinds)

    def in_flight(self, stage: int) -> int:
        return min(self.stages - stage, self.micro_batches)

    def memory(self, stage: int) -> Numbers:
        """[blocks, strategies], what a block adds to the memory of a stage."""
        return self.state + self.in_flight(stage) * self.saved

    @cached_property
    def busy_s(self) -> Numbers:
        """[blocks, strategies], of all micro-batches."""
        return self.micro_batches * self.micro_s + self.last_s

    def chain(self, stage: int, start: int, end: int) -> Chain:
        """Blocks ``start`` to ``end`` as one stage."""
        part = slice(start, end)
        switch_s = self.switch_s * self.micro_batches
        return Chain(self.busy_s[part], self.memory(stage)[part], switch_s, self.limit, self.passing[part])


@dataclass(frozen=True)
class StagePlan:
    """A strategy (index) for each block from ``start`` to ``end``, its times, and what no choice can undercut while it is busy."""

    start: int
    end: int
    choices: tuple[int, ...]
    micro_s: float
    last_s: float
    memory: float
    bound_s: float

    @property
    def whole_s(self) -> float:
        """Of the last micro-batch."""
        return self.micro_s + self.last_s


@dataclass(frozen=True)
class PipelinePlan:
    """The stages of a step that takes ``step_s``."""

    stages: tuple[StagePlan, ...]
    step_s: float

    @property
    def cuts(self) -> Cuts:
        return tuple(stage.end - stage.start for stage in self.stages)

    @property
    def choices(self) -> tuple[int, ...]:
        return tuple(choice for stage in self.stages for choice in stage.choices)


def step_s(stages: Sequence[StagePlan], micro_batches: int) -> float:
    """``(m - 1) * max n + sum c``, n a micro-batch's time and c the last one's (Galvatron-BMW, section 4)."""
    return (micro_batches - 1) * max(stage.micro_s for stage in stages) + sum(stage.whole_s for stage in stages)


def measured(problem: Pipeline, stage: int, start: int, choices: Sequence[int], bound_s: float = 0.0) -> StagePlan:
    """The plan of a stage whose strategies are given."""
    end = start + len(choices)
    rows, chosen = np.arange(start, end), np.asarray(choices)
    micro_s = problem.micro_s[rows, chosen].sum() + problem.switch_s[chosen[:-1], chosen[1:]].sum()
    memory = problem.memory(stage)[rows, chosen].sum() + problem.passing[rows, chosen].max()
    last_s = problem.last_s[rows, chosen].sum()
    return StagePlan(start, end, tuple(map(int, choices)), float(micro_s), float(last_s), float(memory), bound_s)


def mixed(problem: Pipeline, stage: int, start: int, end: int) -> tuple[tuple[int, ...], float] | None:
    """A strategy for each block, so that the stage is busy as briefly as possible (within the solver's tolerance), and the bound."""
    found = solve(problem.chain(stage, start, end), TOLERANCE)
    return (found.choices, found.lower_bound_s) if found is not None else None


def alike(problem: Pipeline, stage: int, start: int, end: int) -> tuple[tuple[int, ...], float] | None:
    """One strategy for all blocks of the stage, the best of them."""
    part = slice(start, end)
    memory = problem.memory(stage)[part].sum(axis=0) + problem.passing[part].max(axis=0)
    busy_s = np.where(memory <= problem.limit, problem.busy_s[part].sum(axis=0), np.inf)
    best = int(busy_s.argmin())
    return ((best,) * (end - start), float(busy_s[best])) if np.isfinite(busy_s[best]) else None


Chooser = Callable[[Pipeline, int, int, int], tuple[tuple[int, ...], float] | None]


@dataclass(frozen=True, eq=False)
class Stages:
    """Plans of stages, each distinct problem (kinds of blocks, micro-batches in flight) solved once."""

    problem: Pipeline
    choose: Chooser = mixed
    _known: dict[tuple[int, tuple[int, ...]], tuple[tuple[int, ...], float] | None] = field(default_factory=dict)

    def __call__(self, stage: int, start: int, end: int) -> StagePlan | None:
        """``None`` if nothing fits."""
        key = self.problem.in_flight(stage), self.problem.kinds[start:end]
        if key not in self._known:
            self._known[key] = self.choose(self.problem, stage, start, end)
        found = self._known[key]
        return measured(self.problem, stage, start, *found) if found is not None else None

    def bound_s(self, stage: int, start: int, end: int) -> float:
        """What the stage is busy at least, if that is known: infinite if nothing fits, 0 if it was not planned."""
        key = self.problem.in_flight(stage), self.problem.kinds[start:end]
        found = self._known.get(key, (0, 0.0))
        return found[1] if found is not None else math.inf

    @property
    def solved(self) -> int:
        return len(self._known)

    def plan(self, cuts: Sequence[int]) -> PipelinePlan | None:
        """The stages of given cuts; ``None`` if one of them does not fit."""
        found = []
        for stage, (start, end) in enumerate(spans(cuts)):
            planned = self(stage, start, end)
            if planned is None:
                return None
            found.append(planned)
        return PipelinePlan(tuple(found), step_s(found, self.problem.micro_batches))


def spans(cuts: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Start and end of each stage."""
    start = 0
    for blocks in cuts:
        yield start, start + blocks
        start += blocks


def lower_bound_s(problem: Pipeline) -> float:
    """What no cut and no strategies can undercut; infinite if nothing can fit.

    The largest micro-batch's time is at least the mean over stages, so a step takes at least the sum over blocks of ``((m - 1) / P + 1)
    * micro + last``; and the stages together hold at least all state and one micro-batch's savings within ``P`` limits. Switches count
    only without stages, because between stages there are none.
    """
    return _relaxed(problem)[1]


def reference_choices(problem: Pipeline) -> tuple[int, ...] | None:
    """Strategies of all blocks if memory could move between stages: a first guess of what the blocks will weigh."""
    return _relaxed(problem)[0]


def _relaxed(problem: Pipeline) -> tuple[tuple[int, ...] | None, float]:
    if problem.stages == 1:
        chain = problem.chain(0, 0, problem.blocks)
    else:
        time_s = ((problem.micro_batches - 1) / problem.stages + 1) * problem.micro_s + problem.last_s
        chain = Chain(time_s, problem.state + problem.saved, np.zeros_like(problem.switch_s), problem.stages * problem.limit)
    found = solve(chain, tolerance=0.01, most_labels=1000)
    return (found.choices, found.lower_bound_s) if found is not None else (None, np.inf)

"""A chain of blocks cut into pipeline stages: numbers of a problem, the plan of each stage, the time of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from hgc.passes.sharding.search.problem import Chain, Numbers
from hgc.passes.sharding.search.solve import TOLERANCE, solve

Cuts = tuple[int, ...]
"""Blocks of each stage."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A value that one block makes and later ones read: what it costs a stage that has readers of it.

    Args:
        maker, readers: positions of blocks, readers ascending.
        time_s: [strategies], of a micro-batch's message and of the gradient's way back, where the maker is in an earlier stage.
        saved: [strategies], memory of a micro-batch, once for all readers of a stage; 0 where the reader's own ``saved`` has it.
        kind: equal where ``time_s`` and ``saved`` are.
    """

    maker: int
    readers: tuple[int, ...]
    time_s: Numbers
    saved: Numbers
    kind: int

    def first_reader(self, start: int, end: int) -> int | None:
        """The first of blocks ``start`` to ``end`` that reads it."""
        return next((reader for reader in self.readers if start <= reader < end), None)


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Blocks of a program for one number of stages and of micro-batches, in the order 1F1B, or interleaved.

    Stage ``i`` of ``P`` holds what ``in_flight(i)`` micro-batches save. All stages have as many devices, of ``limit`` memory each.

    Args:
        micro_s: [blocks, strategies], forward and backward of one micro-batch; infinite where a block cannot have a strategy.
        last_s: [blocks, strategies], what the last micro-batch takes longer (gradients are summed over ranks).
        state: [blocks, strategies], memory whatever is in flight; ``saved``: for each micro-batch in flight; ``passing``: of the
            running block only, the largest of a stage counts.
        switch_s: [strategies, strategies], a micro-batch between unlike neighbours of a stage.
        kinds: of each block; those of one kind have the same numbers.
        virtual: parts of each stage that take turns (Narayanan et al. 2021, section 2.2); cuts count the blocks of all its parts.
        arrivals: values that blocks of later stages may read, skip edges too.
        pace: of each stage, how many times as long as these numbers its devices take, at least 1; ``room``: how many times ``limit`` they
            have, at least 1. Empty: all alike.
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
    virtual: int = 1
    arrivals: tuple[Arrival, ...] = ()
    pace: tuple[float, ...] = ()
    room: tuple[float, ...] = ()

    def limit_of(self, stage: int) -> float:
        return self.limit * (self.room[stage] if self.room else 1.0)

    def pace_of(self, stage: int) -> float:
        return self.pace[stage] if self.pace else 1.0

    @property
    def limits(self) -> tuple[float, ...]:
        return tuple(map(self.limit_of, range(self.stages)))

    @property
    def blocks(self) -> int:
        return len(self.kinds)

    def in_flight(self, stage: int) -> float:
        """Micro-batches whose savings a stage holds: ``P - i`` in 1F1B; of ``v`` parts each ``2 (P - i - 1) + (v - 1) P + 1``."""
        ahead = self.stages - stage - 1
        parts = ahead + 1 if self.virtual == 1 else 2 * ahead + (self.virtual - 1) * self.stages + 1
        return min(parts / self.virtual, self.micro_batches)

    @property
    def steady(self) -> float:
        """How often the longest micro-batch counts in a step beside each stage's first: see :func:`step_s`."""
        return self.micro_batches - 1 / self.virtual

    def memory(self, stage: int) -> Numbers:
        """[blocks, strategies], what a block adds to the memory of a stage."""
        return self.state + self.in_flight(stage) * self.saved

    @cached_property
    def _from_neighbour(self) -> dict[int, list[Arrival]]:
        """Block -> what only it reads, of the block in front of it: that costs a stage something only if it begins there."""
        found: dict[int, list[Arrival]] = {}
        for each in self.arrivals:
            if each.readers == (each.maker + 1,) and not each.saved.any():
                found.setdefault(each.maker + 1, []).append(each)
        return found

    @cached_property
    def _skipping(self) -> list[Arrival]:
        near = {id(each) for found in self._from_neighbour.values() for each in found}
        return [each for each in self.arrivals if id(each) not in near]

    def arriving(self, start: int, end: int) -> tuple[tuple[int, Arrival], ...]:
        """What blocks ``start`` to ``end`` read, as a stage: (position of the first reader in it, value)."""
        near = tuple((0, each) for each in self._from_neighbour.get(start, ()))
        found = ((each.first_reader(start, end), each) for each in self._skipping)
        return near + tuple((reader - start, each) for reader, each in found if reader is not None)

    def signature(self, stage: int, start: int, end: int) -> Hashable:
        """Equal for stages that are the same problem."""
        arriving = tuple((position, each.kind, each.maker < start) for position, each in self.arriving(start, end))
        return self.in_flight(stage), self.kinds[start:end], arriving, self.pace_of(stage), self.limit_of(stage)

    def numbers(self, stage: int, start: int, end: int) -> StageNumbers:
        """Blocks ``start`` to ``end`` as one stage."""
        part = slice(start, end)
        micro_s, memory = self.micro_s[part] * self.pace_of(stage), self.memory(stage)[part].copy()
        for position, each in self.arriving(start, end):
            micro_s[position] += each.time_s if each.maker < start else 0.0
            memory[position] += self.in_flight(stage) * each.saved
        return StageNumbers(micro_s, self.last_s[part] * self.pace_of(stage), memory, self.passing[part])

    def chain(self, stage: int, start: int, end: int) -> Chain:
        """Blocks ``start`` to ``end`` as one stage, to be busy as briefly as possible."""
        found = self.numbers(stage, start, end)
        busy_s = self.micro_batches * found.micro_s + found.last_s
        return Chain(busy_s, found.memory, self.switch_s * self.micro_batches, self.limit_of(stage), found.passing)


@dataclass(frozen=True, eq=False)
class StageNumbers:
    """[blocks, strategies] of one stage, with what arrives; as in :class:`Pipeline`."""

    micro_s: Numbers
    last_s: Numbers
    memory: Numbers
    passing: Numbers


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
    virtual: int = 1

    @property
    def whole_s(self) -> float:
        """Of the last micro-batch, or its last part."""
        return self.micro_s / self.virtual + self.last_s


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
    """``(m - 1) * max n + sum c``, n a micro-batch's time and c the last one's (Galvatron-BMW, section 4).

    With ``v`` parts that take turns pipelines fill and drain by parts: ``(m - 1 / v) * max n + sum c``, c of the last part.
    """
    parts = stages[0].virtual
    return (micro_batches - 1 / parts) * max(stage.micro_s for stage in stages) + sum(stage.whole_s for stage in stages)


def measured(problem: Pipeline, stage: int, start: int, choices: Sequence[int], bound_s: float = 0.0) -> StagePlan:
    """The plan of a stage whose strategies are given."""
    end = start + len(choices)
    found = problem.numbers(stage, start, end)
    rows, chosen = np.arange(end - start), np.asarray(choices)
    micro_s = found.micro_s[rows, chosen].sum() + problem.switch_s[chosen[:-1], chosen[1:]].sum()
    memory = found.memory[rows, chosen].sum() + found.passing[rows, chosen].max()
    last_s = found.last_s[rows, chosen].sum()
    return StagePlan(start, end, tuple(map(int, choices)), float(micro_s), float(last_s), float(memory), bound_s, problem.virtual)


def mixed(problem: Pipeline, stage: int, start: int, end: int) -> tuple[tuple[int, ...], float] | None:
    """A strategy for each block, so that the stage is busy as briefly as possible (within the solver's tolerance), and the bound."""
    found = solve(problem.chain(stage, start, end), TOLERANCE)
    return (found.choices, found.lower_bound_s) if found is not None else None


def alike(problem: Pipeline, stage: int, start: int, end: int) -> tuple[tuple[int, ...], float] | None:
    """One strategy for all blocks of the stage, the best of them."""
    part = problem.numbers(stage, start, end)
    memory = part.memory.sum(axis=0) + part.passing.max(axis=0)
    busy_s = (problem.micro_batches * part.micro_s + part.last_s).sum(axis=0)
    busy_s = np.where(memory <= problem.limit_of(stage), busy_s, np.inf)
    best = int(busy_s.argmin())
    return ((best,) * (end - start), float(busy_s[best])) if np.isfinite(busy_s[best]) else None


Chooser = Callable[[Pipeline, int, int, int], tuple[tuple[int, ...], float] | None]


@dataclass(frozen=True, eq=False)
class Stages:
    """Plans of stages, each distinct problem (kinds of blocks, micro-batches in flight) solved once."""

    problem: Pipeline
    choose: Chooser = mixed
    _known: dict[Hashable, tuple[tuple[int, ...], float] | None] = field(default_factory=dict)

    def __call__(self, stage: int, start: int, end: int) -> StagePlan | None:
        """``None`` if nothing fits."""
        key = self.problem.signature(stage, start, end)
        if key not in self._known:
            self._known[key] = self.choose(self.problem, stage, start, end)
        found = self._known[key]
        return measured(self.problem, stage, start, *found) if found is not None else None

    def bound_s(self, stage: int, start: int, end: int) -> float:
        """What the stage is busy at least, if that is known: infinite if nothing fits, 0 if it was not planned."""
        key = self.problem.signature(stage, start, end)
        found = self._known.get(key, ((), 0.0))
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

    The largest micro-batch's time is at least the mean over stages, so a step of stages without parts takes at least the sum over blocks
    of ``((m - 1) / P + 1) * micro + last``; and the stages together hold at least all state and one micro-batch's savings within ``P``
    limits. Switches count only without stages, because between stages there are none.
    """
    return _relaxed(problem)[1]


def reference_choices(problem: Pipeline) -> tuple[int, ...] | None:
    """Strategies of all blocks if memory could move between stages: a first guess of what the blocks will weigh."""
    return _relaxed(problem)[0]


def quick_bound_s(problem: Pipeline, prices: int = 40) -> float:
    """A lower bound in a hundredth of the time of :func:`lower_bound_s`, which relaxes the same and switches beside it.

    For any price of memory, blocks choose alone: ``sum over blocks of min(time + price * memory) - price * limit`` bounds all choices
    (Lagrangian duality); the best of so many prices between the flattest and the steepest trade counts.
    """
    time_s, memory, limit = _relaxed_numbers(problem)
    kinds, count = np.unique(np.asarray(problem.kinds), return_counts=True)
    of_kind = [np.flatnonzero(np.asarray(problem.kinds) == kind) for kind in kinds]
    time_s, memory = (np.array([numbers[blocks].min(axis=0) for blocks in of_kind]) for numbers in (time_s, memory))
    memory = np.where(np.isfinite(time_s), memory, np.inf)
    usable = np.isfinite(time_s)
    if not usable.any(axis=1).all() or count @ memory.min(axis=1) > limit:
        return math.inf
    time_s, memory = np.where(usable, time_s, 0.0), np.where(usable, memory, 0.0)
    grid = price_grid(np.where(usable, time_s, np.inf), memory, prices)
    lengths = np.where(usable[:, :, None], time_s[:, :, None] + grid * memory[:, :, None], np.inf).min(axis=1)
    return float((count @ lengths - grid * limit).max())


def price_grid(time_s: Numbers, memory: Numbers, prices: int = 40) -> Numbers:
    """Prices of memory from nothing to far above what all times can pay for all memories (arrays of one shape, infinite times left out)."""
    usable = np.isfinite(time_s)
    if not usable.any():
        return np.zeros(1)
    steepest = 1e4 * float(np.ptp(time_s[usable])) / max(float(np.ptp(memory[usable])), 1.0)
    return np.append(0.0, np.geomspace(steepest * 1e-9, steepest, prices)) if steepest > 0 else np.zeros(1)


def _relaxed_numbers(problem: Pipeline) -> tuple[Numbers, Numbers, float]:
    """Times, memory and limit of all blocks as if memory could move between stages, and nothing had to be sent."""
    time_s = (problem.steady / problem.stages + 1 / problem.virtual) * problem.micro_s + problem.last_s
    alive = min(problem.in_flight(stage) for stage in range(problem.stages))
    return time_s, problem.state + alive * problem.saved, sum(problem.limits)


def _relaxed(problem: Pipeline) -> tuple[tuple[int, ...] | None, float]:
    if problem.stages == 1:
        chain = problem.chain(0, 0, problem.blocks)
    else:
        time_s, memory, limit = _relaxed_numbers(problem)
        chain = Chain(time_s, memory, np.zeros_like(problem.switch_s), limit)
    found = solve(chain, tolerance=0.01, most_labels=1000)
    return (found.choices, found.lower_bound_s) if found is not None else (None, np.inf)

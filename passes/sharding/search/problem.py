"""The search as plain numbers: one strategy for each block of a chain, within a memory limit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from hgc.errors import PlanError

Numbers = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Chain:
    """Blocks that follow one another, each to be given one strategy.

    The time of a choice is the sum of its blocks' and of what lies between unlike neighbours; its memory is the sum of its blocks' and
    the largest ``passing`` of them (what only the running block needs). Any unit will do, as long as it is the same everywhere.

    Args:
        time_s: [blocks, strategies]; infinite where a block cannot have a strategy.
        memory: [blocks, strategies], 0 or more.
        switch_s: [strategies, strategies] or [blocks - 1, strategies, strategies], from one block's strategy to the next one's.
        limit: memory that a choice may take.
        passing: [blocks, strategies], 0 or more; default none.
    """

    time_s: Numbers
    memory: Numbers
    switch_s: Numbers
    limit: float
    passing: Numbers = field(default_factory=lambda: np.zeros((0, 0)))

    def __post_init__(self) -> None:
        blocks, strategies = self.time_s.shape
        wanted = (max(blocks - 1, 0), strategies, strategies)
        if self.memory.shape != self.time_s.shape:
            raise PlanError(f"memory has shape {self.memory.shape}; expected that of time_s, {self.time_s.shape}")
        if self.switch_s.shape not in (wanted, wanted[1:]):
            raise PlanError(f"switch_s has shape {self.switch_s.shape}; expected {wanted[1:]} or {wanted}")
        object.__setattr__(self, "switch_s", np.broadcast_to(self.switch_s, wanted))
        if not self.passing.size:
            object.__setattr__(self, "passing", np.zeros_like(self.memory))
        if self.passing.shape != self.time_s.shape:
            raise PlanError(f"passing has shape {self.passing.shape}; expected that of time_s, {self.time_s.shape}")

    @property
    def blocks(self) -> int:
        return int(self.time_s.shape[0])

    @property
    def strategies(self) -> int:
        return int(self.time_s.shape[1])

    def time_of(self, choices: Sequence[int]) -> float:
        """Of a strategy for each block."""
        chosen, rows = np.asarray(choices), np.arange(self.blocks)
        return float(self.time_s[rows, chosen].sum() + self.switch_s[rows[:-1], chosen[:-1], chosen[1:]].sum())

    def memory_of(self, choices: Sequence[int]) -> float:
        chosen, rows = np.asarray(choices), np.arange(self.blocks)
        return float(self.memory[rows, chosen].sum() + self.passing[rows, chosen].max())


@dataclass(frozen=True)
class Solution:
    """A strategy (index) for each block, and what no choice can undercut. ``lower_bound_s`` equals ``time_s`` where it is proven best."""

    choices: tuple[int, ...]
    time_s: float
    memory: float
    lower_bound_s: float

    @property
    def gap(self) -> float:
        """How much faster the best choice could be at most, as a share of it."""
        return (self.time_s - self.lower_bound_s) / self.lower_bound_s if self.lower_bound_s > 0 else 0.0


def solution(chain: Chain, choices: Sequence[int], lower_bound_s: float) -> Solution:
    time_s = chain.time_of(choices)
    return Solution(tuple(map(int, choices)), time_s, chain.memory_of(choices), min(lower_bound_s, time_s))


def caps(chain: Chain) -> list[float]:
    """Values that the largest ``passing`` of a choice may have, ascending; those below which a block has no strategy are left out."""
    usable = np.where(np.isfinite(chain.time_s), chain.passing, np.inf)
    least = usable.min(axis=1).max() if chain.blocks else 0.0
    values = np.unique(usable[np.isfinite(usable)])
    return [float(value) for value in values if value >= least]


def capped(chain: Chain, cap: float) -> Chain:
    """The same with the largest ``passing`` reserved, so that memory is a sum."""
    time_s = np.where(chain.passing <= cap, chain.time_s, np.inf)
    return Chain(time_s, chain.memory, chain.switch_s, chain.limit - cap)

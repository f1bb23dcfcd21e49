"""Which groups, and which sequence in which: packing under a deadline, many at once.

A *row* is one attempt: a deadline, and a way to pack. All rows take their next sequence together, so the work in Python grows with the
number of sequences only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgc.passes.sequence.costs import Fleet, Numbers, Rates
from hgc.passes.sequence.groups import Packed


@dataclass(frozen=True)
class Way:
    """How to pack: the first ``wide`` sequences open groups one degree larger than needed, the first ``alone`` join no group,
    and a sequence goes where the least time (``by_time`` 1), the least memory (0), or the less of both (0.5) is left."""

    wide: int = 0
    alone: int = 0
    by_time: float = 0.5


ALL = 10**6
PLAIN = (Way(),)
CHOSEN = tuple(Way(wide, alone, by_time) for by_time in (0.5, 0.0, 1.0) for wide in (0, 1, 2, 4, ALL) for alone in (0, 3, 6, 12, ALL))


def pack(lengths: Numbers, rates: Rates, fleet: Fleet, deadlines: Numbers, ways: Sequence[Way]) -> list[Packed | None]:
    """Best-fit decreasing within each deadline (seconds): every sequence goes where it leaves the least room, else it opens a group.

    ``lengths`` descend. ``None`` where no way fits everything on the devices.
    """
    rows = _Rows(lengths, rates, fleet, np.repeat(deadlines, len(ways)), list(ways) * len(deadlines))
    for step in range(len(lengths)):
        if not rows.place(step):
            return [None] * len(deadlines)
    first = np.flatnonzero(rows.alive)
    found: list[Packed | None] = [None] * len(deadlines)
    for row in first[::-1]:
        packed = rows.packed(row)
        if fleet.layout([fleet.degrees[d] for d in packed.degrees]) is not None:
            found[row // len(ways)] = packed
    return found


class _Rows:
    def __init__(self, lengths: Numbers, rates: Rates, fleet: Fleet, deadlines: Numbers, ways: Sequence[Way]) -> None:
        rows, n = len(deadlines), len(lengths)
        self._rates, self._deadlines = rates, deadlines
        self._lengths, self._busy = lengths.tolist(), rates.busy(lengths)
        smallest = _smallest_degrees(self._busy, lengths, rates, deadlines)
        wide = np.arange(n)[None, :] < np.array([way.wide for way in ways])[:, None]
        degrees = len(rates.degrees)
        self.alive: NDArray[np.bool_] = np.asarray((smallest < degrees).all(axis=1))
        self._opening = np.minimum(smallest + wide, degrees - 1)
        self._alone = np.array([way.alone for way in ways])
        self._by_time = np.array([way.by_time for way in ways])[:, None]
        shape = (rows, min(n, int(fleet.devices // rates.degrees.min())))
        self._degree = np.zeros(shape, dtype=int)
        self._seconds, self._tokens = np.full(shape, -1.0), np.full(shape, -1.0)  # what is left; no group is open yet
        self._budget, self._capacity = np.ones(shape), np.ones(shape)
        self._opened, self._free = np.zeros(rows, dtype=int), np.full(rows, float(fleet.devices))
        self._group = np.zeros((rows, n), dtype=int)
        self._every = np.arange(rows)

    def place(self, step: int) -> bool:
        """Every row's next sequence; whether any row is still alive."""
        s = self._lengths[step]
        group = self._fullest(s, step)
        self._open(group, step)
        rows = np.flatnonzero(self.alive)
        g = group[rows]
        self._group[rows, step] = g
        self._seconds[rows, g] -= self._busy[self._degree[rows, g], step]
        self._tokens[rows, g] -= s
        return len(rows) > 0

    def _fullest(self, length: float, step: int) -> np.ndarray:
        """For each row the open group in which the sequence leaves the least; -1 where it fits nowhere or shall stay alone."""
        w = slice(0, max(1, int(self._opened.max())))
        time = self._seconds[:, w] - self._busy[:, step][self._degree[:, w]]
        memory = self._tokens[:, w] - length
        fits = (time >= 0) & (memory >= 0)
        time, memory = time / self._budget[:, w], memory / self._capacity[:, w]
        left = np.where(self._by_time == 0.5, np.minimum(time, memory), np.where(self._by_time == 1.0, time, memory))
        left = np.where(fits, left, np.inf)
        best = left.argmin(axis=1)
        joins = (left[self._every, best] < np.inf) & (step >= self._alone)
        return np.where(joins, best, -1)

    def _open(self, group: np.ndarray, step: int) -> None:
        """New groups where ``group`` is -1; rows without devices for one die."""
        rows = np.flatnonzero(self.alive & (group < 0))
        chosen = self._opening[rows, step]
        enough = (self._rates.degrees[chosen] <= self._free[rows]) & (self._opened[rows] < self._degree.shape[1])
        self.alive[rows[~enough]] = False
        rows, chosen = rows[enough], chosen[enough]
        g = self._opened[rows]
        self._degree[rows, g] = chosen
        self._seconds[rows, g] = self._budget[rows, g] = self._deadlines[rows] - self._rates.fixed[chosen]
        self._tokens[rows, g] = self._capacity[rows, g] = self._rates.tokens[chosen]
        self._free[rows] -= self._rates.degrees[chosen]
        self._opened[rows] += 1
        group[rows] = g

    def packed(self, row: int) -> Packed:
        members: list[list[int]] = [[] for _ in range(self._opened[row])]
        for i, group in enumerate(self._group[row].tolist()):
            members[group].append(i)
        return Packed(tuple(self._degree[row, : len(members)].tolist()), tuple(tuple(each) for each in members))


def _smallest_degrees(busy: Numbers, lengths: Numbers, rates: Rates, deadlines: Numbers) -> np.ndarray:
    """[deadlines, lengths]: index of the smallest degree that holds a sequence in time and memory; their number where none does."""
    fits = (busy[None] <= (deadlines[:, None] - rates.fixed[None])[:, :, None]) & (lengths[None, None] <= rates.tokens[None, :, None])
    return np.where(fits.any(axis=1), fits.argmax(axis=1), len(rates.degrees))

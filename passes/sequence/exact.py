"""Is there a packing within a deadline? By search with pruning, for micro-batches whose few long sequences decide."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hgc.passes.sequence.costs import Fleet, Numbers, Rates
from hgc.passes.sequence.groups import Packed


class OutOfNodesError(Exception):
    """The search was stopped before it knew."""


@dataclass
class _Group:
    degree: int
    seconds: float
    tokens: float
    members: list[int] = field(default_factory=list)


class Decision:
    """``run`` gives a packing of ``lengths`` (descending) within ``deadline`` seconds, or ``None`` where none exists."""

    def __init__(self, lengths: Numbers, rates: Rates, fleet: Fleet, deadline: float, nodes: int) -> None:
        self._lengths, self._rates, self._fleet, self._nodes = lengths.tolist(), rates, fleet, nodes
        self.visited = 0
        busy = rates.busy(lengths)
        budget = deadline - rates.fixed
        fits = (busy <= budget[:, None]) & (lengths[None, :] <= rates.tokens[:, None])
        self._possible = bool(fits.any(axis=0).all())
        self._smallest = fits.argmax(axis=0).tolist()
        need = np.where(fits, busy * (rates.degrees / np.where(budget > 0, budget, np.inf))[:, None], np.inf).min(axis=0)
        self._need = [*np.cumsum(need[::-1])[::-1].tolist(), 0.0]
        self._tokens = [*np.cumsum(lengths[::-1])[::-1].tolist(), 0.0]
        self._busy = busy.T.tolist()
        self._budget, self._capacity, self._degrees = budget.tolist(), rates.tokens.tolist(), rates.degrees.tolist()
        self._per_device = self._capacity[0] / self._degrees[0]
        self._groups: list[_Group] = []

    def run(self) -> Packed | None:
        """Raises :class:`OutOfNodesError` if neither is known after the given number of nodes."""
        if not self._possible or not self._place(0, float(self._fleet.devices)):
            return None
        return Packed(tuple(g.degree for g in self._groups), tuple(tuple(g.members) for g in self._groups))

    def _place(self, i: int, free: float) -> bool:
        if i == len(self._lengths):
            return self._fleet.layout([self._fleet.degrees[g.degree] for g in self._groups]) is not None
        self.visited += 1
        if self.visited > self._nodes:
            raise OutOfNodesError
        if not self._enough(i, free):
            return False
        s, busy = self._lengths[i], self._busy[i]
        for group in self._distinct(s, busy):
            self._put(group, i, s, busy[group.degree])
            if self._place(i + 1, free):
                return True
            self._take(group, s, busy[group.degree])
        for degree in range(self._smallest[i], len(self._degrees)):
            if self._degrees[degree] > free:
                break
            group = _Group(degree, self._budget[degree], self._capacity[degree])
            self._groups.append(group)
            self._put(group, i, s, busy[degree])
            if self._place(i + 1, free - self._degrees[degree]):
                return True
            self._groups.pop()
        return False

    def _enough(self, i: int, free: float) -> bool:
        """Whether free devices and the room in open groups may hold what is left."""
        room = sum(self._degrees[g.degree] * g.seconds / self._budget[g.degree] for g in self._groups)
        tokens = sum(g.tokens for g in self._groups)
        slack = 1 + 1e-9
        return bool(self._need[i] <= (free + room) * slack and self._tokens[i] <= (free * self._per_device + tokens) * slack)

    def _distinct(self, s: float, busy: list[float]) -> list[_Group]:
        """Groups that have room, fullest first, of equal ones only one."""
        found: dict[tuple[int, float, float], _Group] = {}
        for group in self._groups:
            if busy[group.degree] <= group.seconds and s <= group.tokens:
                found.setdefault((group.degree, group.seconds, group.tokens), group)
        return sorted(found.values(), key=lambda group: (group.seconds - busy[group.degree]) / self._budget[group.degree])

    @staticmethod
    def _put(group: _Group, i: int, s: float, busy: float) -> None:
        group.members.append(i)
        group.seconds -= busy
        group.tokens -= s

    @staticmethod
    def _take(group: _Group, s: float, busy: float) -> None:
        group.members.pop()
        group.seconds += busy
        group.tokens += s

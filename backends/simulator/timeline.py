"""What happened when, and where the time of each rank went."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

ACTIONS = "actions"
"""The row of a timeline that shows whole actions; its time is that of the other rows."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something on a row of a rank: ``"compute"``, ``"optimizer"``, an axis of communication, or ``"actions"``; seconds from the start."""

    row: str
    begin_s: float
    end_s: float
    name: str


@dataclass(frozen=True)
class Axis:
    """Communication over a mesh axis (``"pp"``: between stages). ``exposed_s``: what the device waited for it, turns included."""

    name: str
    total_s: float
    exposed_s: float

    @property
    def hidden_s(self) -> float:
        """What ran beside computation."""
        return max(0.0, self.total_s - self.exposed_s)


@dataclass(frozen=True)
class Parts:
    """Where the time of a rank goes: ``busy + exposed + bubble`` is the step. ``bubble_s``: waiting for other ranks to compute."""

    compute_s: float
    optimizer_s: float
    bubble_s: float
    communication: tuple[Axis, ...]

    @property
    def exposed_s(self) -> float:
        return sum(axis.exposed_s for axis in self.communication)

    @property
    def step_s(self) -> float:
        return self.compute_s + self.optimizer_s + self.bubble_s + self.exposed_s

    def on(self, axis: str) -> Axis:
        """The axis of that name; nothing happens on one that does not occur."""
        return next((found for found in self.communication if found.name == axis), Axis(axis, 0.0, 0.0))


def mean(parts: Sequence[Parts], weights: Sequence[int]) -> Parts:
    """The average over ranks."""
    total = sum(weights)

    def average(values: Iterable[float]) -> float:
        return sum(value * weight for value, weight in zip(values, weights, strict=True)) / total

    names = sorted({axis.name for each in parts for axis in each.communication})
    return Parts(
        average(each.compute_s for each in parts),
        average(each.optimizer_s for each in parts),
        average(each.bubble_s for each in parts),
        tuple(
            Axis(name, average(each.on(name).total_s for each in parts), average(each.on(name).exposed_s for each in parts))
            for name in names
        ),
    )


@dataclass(frozen=True)
class Timeline:
    """One training step. ``ranks[i]`` are ranks that do the same; ``parts[i]`` and ``events[i]`` are those of each of them."""

    step_s: float
    ranks: tuple[tuple[int, ...], ...]
    parts: tuple[Parts, ...]
    events: tuple[tuple[Event, ...], ...]

    @property
    def mean(self) -> Parts:
        """The average over all ranks."""
        return mean(self.parts, [len(ranks) for ranks in self.ranks])

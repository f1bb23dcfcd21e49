"""A plan for one batch of sequences: micro-batches of groups of devices, and who computes what."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from hgc.passes.sequence.costs import Fleet, Numbers, Rates, SequenceCosts


@dataclass(frozen=True)
class Group:
    """``degree`` devices from ``first_device`` on split each of ``sequences``, which are places in the batch."""

    degree: int
    first_device: int
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class MicroBatch:
    """Groups that run side by side; ``seconds`` is the time of the slowest, which none can be faster than ``bound_s``."""

    groups: tuple[Group, ...]
    seconds: float
    bound_s: float

    def __str__(self) -> str:
        counts = Counter(group.degree for group in self.groups)
        return " + ".join(f"{counts[degree]}x{degree}" for degree in sorted(counts, reverse=True))


@dataclass(frozen=True)
class SequencePlan:
    """Micro-batches one after the other, and ``step_s`` once. ``bound_s``: no plan with the same micro-batches takes less."""

    micro_batches: tuple[MicroBatch, ...]
    step_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.step_s + sum(each.seconds for each in self.micro_batches)

    @property
    def bound_s(self) -> float:
        return self.step_s + sum(each.bound_s for each in self.micro_batches)

    @property
    def gap(self) -> float:
        """How far the plan is above its bound, at most."""
        return self.seconds / self.bound_s - 1.0


@dataclass(frozen=True)
class Packed:
    """Sequences (places in an array of lengths) by group: ``degrees[g]`` is the index of group ``g``'s degree."""

    degrees: tuple[int, ...]
    members: tuple[tuple[int, ...], ...]

    def seconds(self, lengths: Numbers, rates: Rates) -> float:
        """Of the slowest group."""
        return max(rates.seconds(d, lengths[list(m)]) for d, m in zip(self.degrees, self.members, strict=True))

    def micro_batch(self, lengths: Numbers, places: np.ndarray, rates: Rates, fleet: Fleet, bound_s: float) -> MicroBatch:
        """As part of a plan; ``places`` of the lengths in the batch. ``bound_s``: 0 where nothing is proven."""
        degrees = [fleet.degrees[d] for d in self.degrees]
        first = fleet.layout(degrees)
        assert first is not None
        found = [Group(d, f, tuple(int(places[i]) for i in m)) for d, f, m in zip(degrees, first, self.members, strict=True)]
        seconds = self.seconds(lengths, rates)
        return MicroBatch(tuple(sorted(found, key=lambda group: group.first_device)), seconds, min(bound_s, seconds))


def check(plan: SequencePlan, lengths: Numbers, costs: SequenceCosts, fleet: Fleet) -> None:
    """Every sequence once, every device in one group at a time, no group above its memory."""
    seen = sorted(place for each in plan.micro_batches for group in each.groups for place in group.sequences)
    assert seen == list(range(len(lengths))), "a sequence is lost or used twice"
    for each in plan.micro_batches:
        taken = sorted(device for g in each.groups for device in range(g.first_device, g.first_device + g.degree))
        assert len(taken) == len(set(taken)), "two groups share a device"
        assert taken[-1] < fleet.devices, "a group reaches beyond the last device"
        for group in each.groups:
            inside = group.first_device % fleet.node_devices + group.degree <= fleet.node_devices
            assert inside or group.first_device % fleet.node_devices == 0, "a group crosses a node's border"
            tokens = lengths[list(group.sequences)].sum()
            assert tokens <= group.degree * costs.tokens_per_device * (1 + 1e-9), "a group holds more tokens than fit"

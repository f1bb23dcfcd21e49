"""The result of a simulation, and its short table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hgc.backends.simulator import picture, trace
from hgc.backends.simulator.numbers import seconds, size
from hgc.backends.simulator.timeline import Parts, Timeline
from hgc.cluster import Cluster
from hgc.schedule.actions import shown_ranks


@dataclass(frozen=True)
class StageMemory:
    """Bytes on the fullest rank of a stage, by category (the terms of ``hgc.cost.memory.Memory``), in the order of the stages."""

    stage: int
    ranks: tuple[int, ...]
    terms: tuple[tuple[str, float], ...]
    total: float

    def term(self, *names: str) -> float:
        """The sum of some categories."""
        return sum(amount for name, amount in self.terms if name in names)


@dataclass(frozen=True)
class DeviceMemory:
    """The same for a device with all its ``stages``; ``ranks`` are alike."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    terms: tuple[tuple[str, float], ...]
    total: float

    @property
    def tensors(self) -> float:
        """Without what the driver, NCCL and the allocator take."""
        return self.total - dict(self.terms)["reserve"]


@dataclass(frozen=True)
class Simulation:
    """What a training step is predicted to take.

    ``step_s``: from its beginning to the end of the last rank's optimizer. ``parts``: where that time goes, on average over ranks.
    ``memory``: of each stage; ``on_devices``: of each device, alike ones once. ``between_nodes_bytes``: what leaves nodes in one step, of
    all ranks together. ``notes``: assumptions and gaps.
    """

    step_s: float
    parts: Parts
    memory: tuple[StageMemory, ...]
    on_devices: tuple[DeviceMemory, ...]
    between_nodes_bytes: float
    timeline: Timeline = field(repr=False)
    devices: int = 1
    micro_batches: int = 1
    schedule: str = ""
    notes: tuple[str, ...] = ()

    @property
    def fullest(self) -> DeviceMemory:
        """The device that holds most."""
        return max(self.on_devices, key=lambda device: device.total)

    def fullness(self, cluster: Cluster) -> float:
        """Memory of the device that is nearest to its end, as a share of what it has there."""
        owned = [(device.total, cluster.nodes[cluster.owners[rank]].device) for device in self.on_devices for rank in device.ranks]
        return max(total / device.memory_bytes for total, device in owned)

    @property
    def peak_bytes(self) -> float:
        """Of the fullest device."""
        return self.fullest.total

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as JSON that Perfetto and chrome://tracing open."""
        trace.save(self.timeline, path)

    def draw(self, path: str | Path) -> None:
        """Write the timeline as a picture (``.svg``): one row for each group of ranks, colours by kind."""
        picture.save(self.timeline, path)

    def __str__(self) -> str:
        return "\n".join(f"{name:<22}{text}".rstrip() for name, text in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        order = f", {self.schedule}" if self.schedule else ""
        yield "step", f"{seconds(self.step_s):>9}         on {self.devices} device{'s' * (self.devices > 1)}{batches}{order}"
        yield "  compute", self._share(self.parts.compute_s)
        for axis in self.parts.communication:
            hides = axis.hidden_s > 1e-3 * axis.total_s  # less is rounding
            hidden = f"  of {seconds(axis.total_s)}, the rest hidden behind compute" if hides else ""
            yield f"  waiting for {axis.name}", self._share(axis.exposed_s) + hidden
        yield "  optimizer", self._share(self.parts.optimizer_s)
        if self.parts.bubble_s > 1e-9 * self.step_s:
            yield "  bubble", self._share(self.parts.bubble_s)
        of = f", stage{'s' * (len(self.fullest.stages) > 1)} {shown_ranks(self.fullest.stages)} of {len(self.memory)}"
        where = f"rank{'s' * (len(self.fullest.ranks) > 1)} {shown_ranks(self.fullest.ranks)}{of if len(self.memory) > 1 else ''}"
        yield "memory", f"{size(self.peak_bytes):>9}         on the fullest device, {where}"
        for name, amount in sorted(self.fullest.terms, key=lambda term: -term[1]):
            if amount >= _SHOWN * self.peak_bytes:
                yield f"  {name}", f"{size(amount):>9}"
        if self.between_nodes_bytes:
            yield "between nodes", f"{size(self.between_nodes_bytes):>9}         of all ranks, each step"
        for note in self.notes:
            yield "note", note

    def _share(self, amount: float) -> str:
        return f"{seconds(amount):>9}  {amount / self.step_s:5.1%}" if self.step_s else f"{seconds(amount):>9}"


_SHOWN = 0.005
"""Categories of memory below this share are left out of the table."""

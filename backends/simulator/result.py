"""The result of a simulation, and its short table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from hgc.backends.simulator.timeline import Parts, Timeline
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
class Simulation:
    """What a training step is predicted to take.

    ``step_s``: from its beginning to the end of the last rank's optimizer. ``parts``: where that time goes, on average over ranks.
    ``memory``: of each stage; ``peak_bytes``: of the fullest device, with all its stages. ``notes``: assumptions and gaps.
    """

    step_s: float
    parts: Parts
    memory: tuple[StageMemory, ...]
    peak_bytes: float
    timeline: Timeline = field(repr=False)
    devices: int = 1
    micro_batches: int = 1
    schedule: str = ""
    notes: tuple[str, ...] = ()

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as JSON that Perfetto and chrome://tracing open."""
        from hgc.backends.simulator.trace import save

        save(self.timeline, path)

    def draw(self, path: str | Path) -> None:
        """Write the timeline as a picture (``.svg``): one row for each group of ranks, colours by kind."""
        from hgc.backends.simulator.picture import save

        save(self, path)

    def __str__(self) -> str:
        return "\n".join(f"{name:<22}{text}".rstrip() for name, text in self._rows())

    def _rows(self) -> Iterator[tuple[str, str]]:
        batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        order = f", {self.schedule}" if self.schedule else ""
        yield "step", f"{seconds(self.step_s):>9}  on {self.devices} device{'s' * (self.devices > 1)}{batches}{order}"
        yield "  compute", self._share(self.parts.compute_s)
        for axis in self.parts.communication:
            hides = axis.hidden_s > 1e-3 * axis.total_s  # less is rounding
            hidden = f"  ({seconds(axis.total_s)} in all, {seconds(axis.hidden_s)} hidden)" if hides else ""
            yield f"  waiting for {axis.name}", self._share(axis.exposed_s) + hidden
        yield "  optimizer", self._share(self.parts.optimizer_s)
        if self.parts.bubble_s > 0:
            yield "  bubble", self._share(self.parts.bubble_s)
        yield "memory", f"{size(self.peak_bytes):>9}  at most on a device"
        for stage in self._unlike_stages():
            named = ", ".join(f"{name} {size(amount)}" for name, amount in stage.terms if amount)
            where = f"  stage {stage.stage}" if len(self.memory) > 1 else f"  ranks {shown_ranks(stage.ranks)}"
            yield where, f"{size(stage.total):>9}  {named}"
        for note in self.notes:
            yield "note", note

    def _share(self, amount: float) -> str:
        return f"{seconds(amount):>9}  {amount / self.step_s:5.1%}" if self.step_s else f"{seconds(amount):>9}"

    def _unlike_stages(self) -> list[StageMemory]:
        """Stages that differ from the one before."""
        found: list[StageMemory] = []
        for stage in self.memory:
            if not found or stage.terms != found[-1].terms:
                found.append(stage)
        return found


def seconds(amount: float) -> str:
    """``1.25 s``, ``3.1 ms``, ``17 us``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount / 1e-6:.3g} us"


def size(amount: float) -> str:
    """``3.5 GiB``."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount:.0f} B"

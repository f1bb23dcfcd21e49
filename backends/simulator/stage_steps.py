"""From the times of a stage's blocks to the steps of its actions: what overlaps with what."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from hgc.backends.simulator.units import ROOT, Bucket, Unit
from hgc.backends.simulator.work import COMPUTE, Step, Steps
from hgc.cost.collectives import Kind as CollectiveKind
from hgc.cost.execution import Execution
from hgc.cost.stage_time import BlockTime, Segment
from hgc.schedule import Kind

Collective = Callable[[CollectiveKind, tuple[str, ...], float], float]
"""``(kind, axes, bytes) -> seconds`` of a collective among the ranks of a stage."""

SCALAR_BYTES = 8


@dataclass(frozen=True)
class StageWork:
    """One stage: its blocks in order (where they stand, and their times), the state that moves, and how the runtime overlaps.

    ``zero``: as in a strategy, 0 if nothing is sharded. ``axes``: over which units are gathered and scattered.
    ``runs_ahead``: the device takes work in advance, so that a unit is gathered while the one before runs (CUDA; on a CPU FSDP2 waits).
    ``name``: tells it from other stages of the same ranks. ``tensor_ranks``: of a group over ``tp``.
    ``accumulation_s``: what a micro-batch after the first takes to add its gradients to the sums.
    ``moving``: ``(bytes, tensors) -> seconds`` in which FSDP2 packs or unpacks so much, ``unit_s``: what its hooks
    take for each gather and scatter; both count where nothing runs ahead.
    """

    blocks: tuple[tuple[str, BlockTime], ...]
    unit_of: tuple[int, ...]
    units: Mapping[int, Unit]
    buckets: tuple[Bucket, ...]
    zero: int
    axes: tuple[str, ...]
    seconds: Collective
    execution: Execution
    runs_ahead: bool
    name: str = ""
    tensor_ranks: int = 1
    accumulation_s: float = 0.0
    moving: Callable[[float, int], float] = lambda bytes_, tensors: 0.0
    unit_s: float = 0.0

    @property
    def _pieces(self) -> int:
        return self.tensor_ranks if self.execution.overlap_tensor else 1

    @property
    def once(self) -> bool:
        """Does ZeRO move state once a step, outside the blocks' actions: ahead of them, or behind the last?"""
        ahead = self.execution.state_ahead and self.runs_ahead
        return self.zero in (1, 2) and (ahead or not self.execution.overlap_gradients)

    def steps(self, kind: Kind, *, first: bool, last: bool) -> Steps:
        """Of forward or backward; ``first``: of the training step's first micro-batch, ``last``: of its last."""
        if kind == "F":
            return tuple(self._forward(gathers=self.zero == 3 or (self.zero > 0 and first and not self.once), ahead=self.once and first))
        adds = kind != "I" and not first and self.accumulation_s > 0
        return (*self._backward(kind, last), *([Step(self.accumulation_s, COMPUTE, "add gradients")] if adds else []))

    # -- forward ------------------------------------------------------------------------------------------------------------------------

    def begins(self) -> Steps:
        """At the beginning of the training step: all units are gathered, one after the other, and nobody waits."""
        ahead = self.once and self.execution.overlap_gradients
        return tuple(self._gather(unit, self._key("gather", unit)) for unit in dict.fromkeys((ROOT, *self.unit_of))) if ahead else ()

    def _key(self, what: str, unit: int) -> str:
        return f"{what} {unit} of {self.name}"

    def _forward(self, gathers: bool, ahead: bool) -> Iterator[Step]:
        order = [unit for unit in self.unit_of if unit != ROOT] if gathers else []
        if gathers:
            yield from self._gathered(ROOT)
        if ahead:
            yield Step(wait=self._key("gather", ROOT))
        yield from self._prefetch(order, 0)
        for position, (path, time) in enumerate(self.blocks):
            unit = self.unit_of[position]
            if ahead:
                yield Step(wait=self._key("gather", unit))
            if unit in order:
                yield from self._whole(order, order.index(unit))
            steps = _block(path, time.forward, self._pieces, self.execution.overlap_slowdown)
            yield from _loss_unread(list(steps)) if position == len(self.blocks) - 1 else steps

    def _prefetch(self, order: Sequence[int], index: int) -> Iterator[Step]:
        """Start to gather a unit while the one before it runs."""
        if self.runs_ahead and index < len(order):
            yield self._gather(order[index], f"gather {order[index]}")

    def _whole(self, order: Sequence[int], index: int) -> Iterator[Step]:
        """Wait until a unit is gathered, and start the next."""
        unit = order[index]
        if self.runs_ahead:
            yield Step(wait=f"gather {unit}")
        else:
            yield from self._gathered(unit)
        yield from self._prefetch(order, index + 1)

    def _gathered(self, unit: int) -> Iterator[Step]:
        """A gather that the device waits for, between the copies into and out of its buffers."""
        moved = self.units[unit]
        if not self.runs_ahead:
            yield self._packing(unit, 2 * moved.gathered_bytes / moved.ranks, self.unit_s)
        yield self._gather(unit, "")
        if not self.runs_ahead:
            yield self._packing(unit, 2 * moved.gathered_bytes)

    def _packing(self, unit: int, bytes_: float, more_s: float = 0.0) -> Step:
        return Step(self.moving(bytes_, self.units[unit].tensors) + more_s, COMPUTE, f"pack {self._name(unit)}")

    def _gather(self, unit: int, key: str) -> Step:
        return self._collective("all_gather", self.axes, self.units[unit].gathered_bytes, f"gather {self._name(unit)}", key)

    def _collective(self, kind: CollectiveKind, axes: tuple[str, ...], bytes_: float, name: str, key: str) -> Step:
        return Step(self.seconds(kind, axes, bytes_), "+".join(axes), name, key, collective=kind, payload_bytes=bytes_)

    def _name(self, unit: int) -> str:
        return "root" if unit == ROOT else self.blocks[self.unit_of.index(unit)][0]

    # -- backward -----------------------------------------------------------------------------------------------------------------------

    def _backward(self, kind: Kind, last: bool) -> Iterator[Step]:
        gathers = self.zero == 3 and kind != "W"
        scatters = kind != "I" and not self.once and (self.zero > 1 or (self.zero == 1 and last))
        ahead = self.once and last and kind != "I" and self.execution.overlap_gradients
        order = [unit for unit in reversed(self.unit_of) if unit != ROOT] if gathers else []
        waiting = ""
        yield from self._prefetch(order, 0)
        for position, (path, time) in reversed(list(enumerate(self.blocks))):
            unit = self.unit_of[position]
            if unit in order:
                yield from self._whole(order, order.index(unit))
            segments = _of_kind(time.backward, kind)
            overlaps, slowdown = self.execution.overlap_products, self.execution.overlap_slowdown
            yield from _block(path, _weights_behind(segments) if overlaps else segments, self._pieces, slowdown, overlaps)
            if scatters and unit != ROOT:
                yield from self._scatter(unit, waiting)
                waiting = f"scatter {unit}"
            if ahead and unit != ROOT:
                yield self._sum(unit, self._key("scatter", unit))
            if last and kind != "I" and self.execution.overlap_gradients:
                yield from self._buckets(position)
        if scatters:
            yield from self._scatter(ROOT, waiting)
            yield Step(wait=f"scatter {ROOT}")
        if ahead:
            yield self._sum(ROOT, self._key("scatter", ROOT))

    def _scatter(self, unit: int, waiting: str) -> Iterator[Step]:
        """Sum and share out the gradients of a unit; the one before has to be through, whose memory is used again."""
        if waiting:
            yield Step(wait=waiting)
        if not self.runs_ahead:
            yield self._packing(unit, 2 * self.units[unit].summed_bytes, self.unit_s)
        yield self._sum(unit, f"scatter {unit}" if self.runs_ahead else "")

    def _sum(self, unit: int, key: str) -> Step:
        kind: CollectiveKind = "all_reduce" if self.execution.sums_whole and self.zero < 3 else "reduce_scatter"
        return self._collective(kind, self.axes, self.units[unit].summed_bytes, f"scatter {self._name(unit)}", key)

    def _buckets(self, position: int) -> Iterator[Step]:
        """Buckets whose last gradient a block has made, if those before have started."""
        earlier = len(self.blocks)
        for index, bucket in enumerate(self.buckets):
            earlier = min(earlier, bucket.block)
            if earlier == position:
                yield self._bucket(index, f"bucket {index}")

    def _bucket(self, index: int, key: str) -> Step:
        bucket = self.buckets[index]
        return self._collective("all_reduce", bucket.axes, bucket.bytes, f"bucket {index}", key)

    def synchronised(self) -> Steps:
        """At the end of the training step: all buckets are summed, and what ZeRO moves outside the blocks."""
        units = tuple(dict.fromkeys((*reversed(self.unit_of), ROOT))) if self.once else ()
        if self.execution.overlap_gradients:
            waits = tuple(Step(wait=f"bucket {index}") for index in range(len(self.buckets)))
            return waits + tuple(Step(wait=self._key("scatter", unit)) for unit in units)
        sums = tuple(self._bucket(index, "") for index in range(len(self.buckets)))
        return sums + tuple(self._sum(unit, "") for unit in units) + tuple(self._gather(unit, "") for unit in units)


def _loss_unread(steps: Sequence[Step]) -> Sequence[Step]:
    """The sum of the loss at the end of the last forward: backward does not read it, so nobody waits (``hgc.ir.ops.collectives``)."""
    *others, last = steps
    is_loss = last.collective == "all_reduce" and 0 < last.payload_bytes <= SCALAR_BYTES
    return [*others, replace(last, key="loss")] if is_loss else steps


def _of_kind(segments: Iterable[Segment], kind: Kind) -> list[Segment]:
    return [segment for segment in segments if kind == "B" or segment.weight == (kind == "W")]


def _weights_behind(segments: Iterable[Segment]) -> list[Segment]:
    """The weights' products of layers whose input's gradient a collective over ``tp`` sums come behind that, not in front of it.

    Between two collectives the first product belongs to the layer that got its gradient from the one before, if there are others.
    """
    found: list[Segment] = []
    run: list[Segment] = []
    for segment in segments:
        if segment.collective and segment.axis == "tp":
            weights = [each for each in run if each.weight]
            moved = weights[1:] or weights
            found += [each for each in run if all(each is not other for other in moved)]
            found += [segment, Segment(sum(each.seconds for each in moved), weight=True)] if moved else [segment]
            run = []
        else:
            run.append(segment)
    return found + run


def _block(path: str, segments: Sequence[Segment], pieces: int, slowdown: float, overlaps: bool = False) -> Iterator[Step]:
    """Segments one after the other. With ``pieces`` above 1 gathers and scatters over ``tp`` run beside the computation next to them, all
    but one piece; if ``overlaps``, weights' products run beside the collective in front of them. Computation beside a collective is
    ``slowdown`` times slower."""
    beside = _beside(segments, pieces) if pieces > 1 else {}
    waiting = ""
    for index, segment in enumerate(segments):
        if segment.collective:
            exposed = segment.seconds - sum(seconds for source, seconds in beside.values() if source == index)
            weights = overlaps and index + 1 < len(segments) and segments[index + 1].weight
            waiting = f"beside {index}" if weights else ""
            name = f"{segment.collective} {path}"
            yield Step(exposed, segment.axis, name, waiting, collective=segment.collective, payload_bytes=segment.payload_bytes)
            continue
        if index in beside:
            source, seconds = beside[index]
            yield Step(seconds, segments[source].axis, f"{segments[source].collective} {path}", key=f"pieces {index}")
        together = beside[index][1] if index in beside else min(segments[index - 1].seconds, segment.seconds) if waiting else 0.0
        yield Step(segment.seconds + (slowdown - 1) * together, COMPUTE, path)
        if index in beside:
            yield Step(wait=f"pieces {index}")
        if waiting:
            yield Step(wait=waiting)
            waiting = ""


def _beside(segments: Sequence[Segment], pieces: int) -> dict[int, tuple[int, float]]:
    """Computation -> the collective beside it, and for how long: a gather beside what follows, a scatter beside what comes before."""
    found: dict[int, tuple[int, float]] = {}
    for index, segment in enumerate(segments):
        if segment.axis != "tp" or segment.collective not in ("all_gather", "reduce_scatter"):
            continue
        near = index + 1 if segment.collective == "all_gather" else index - 1
        if 0 <= near < len(segments) and near not in found and not segments[near].collective:
            found[near] = index, min(segment.seconds * (pieces - 1) / pieces, segments[near].seconds)
    return found

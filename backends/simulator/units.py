"""Traffic of parameters and gradients as the runtime has it: units that FSDP2 gathers as one, and buckets that are summed as one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from hgc.cost.memory import local_bytes
from hgc.ir.placement import Replicated
from hgc.ir.program import STATE, Program, State
from hgc.plan import Precision

BUCKET_BYTES, FIRST_BUCKET_BYTES = 25 * 2**20, 2**20
"""As the runtime's reducer has them."""
ROOT = -1
"""The unit of everything that is in no repeated block."""
_REPEATED = re.compile(r"(^|\.)\d+$")
_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: bytes of the whole (of a tensor-parallel rank), and of their gradients."""

    gathered_bytes: float
    summed_bytes: float


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together over ``axes``, once the backward of ``block`` (its position) is through."""

    axes: tuple[str, ...]
    block: int
    bytes: float


class StateTraffic:
    """For a lowered program whose state is sharded as ``zero`` says.

    ``axes``: those over which FSDP2 shards and the buckets of most parameters are summed. ``unit_of[position]``: the unit of a block.
    """

    def __init__(self, program: Program, zero: int, precision: Precision) -> None:
        self.program, self.precision = program, precision
        self.paths = [block.path for block in program.blocks()]
        trained = [entry for entry in program.state.values() if is_trained(entry)]
        deferred = {axis for entry in trained for axis in summed_over(entry)}
        self.axes = tuple(axis for axis in program.mesh if axis in deferred)
        self.sharded = bool(zero and self.axes)
        self.uses = _uses(program)

    def is_sharded(self, entry: State) -> bool:
        """Does FSDP2 hold it? Frozen parameters too, if they are whole on all axes."""
        if not self.sharded or entry.kind != "parameter" or not entry.value.shape:
            return False
        if not is_trained(entry):
            return all(axis in summed_over(entry) or str(entry.value.on(axis)) == "I" for axis in self.axes)
        return summed_over(entry) == self.axes

    @cached_property
    def unit_of(self) -> list[int]:
        """For each block: the number of its unit, or :data:`ROOT`."""
        found: list[int] = []
        count = 0
        for position, path in enumerate(self.paths):
            alone = any(self.uses.get(name) == {position} for name in self.uses if self.is_sharded(self.program.state[name]))
            found.append(count if _REPEATED.search(path) and alone else ROOT)
            count += found[-1] != ROOT
        return found

    @cached_property
    def units(self) -> Mapping[int, Unit]:
        """By number; what several blocks read belongs to the root."""
        entries: dict[int, list[State]] = {ROOT: []}
        for name, positions in self.uses.items():
            entry = self.program.state[name]
            if self.is_sharded(entry):
                unit = self.unit_of[next(iter(positions))] if len(positions) == 1 else ROOT
                entries.setdefault(unit, []).append(entry)
        return {unit: Unit(self._bytes(found, self._gathered), self._bytes(found, self._summed)) for unit, found in entries.items()}

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they start: parameters in reverse, a first small bucket for each group of ranks, then full ones."""
        order = {name: index for index, name in enumerate(self.uses)}
        entries = [entry for entry in self.program.state.values() if is_trained(entry) and entry.name in order]
        open_: dict[tuple[tuple[str, ...], torch.dtype], tuple[int, float]] = {}
        made: list[Bucket] = []
        for entry in sorted(entries, key=lambda entry: -order[entry.name]):
            axes = summed_over(entry)
            if not axes or self.is_sharded(entry):
                continue
            key, size = (axes, entry.value.dtype), self._bytes([entry], self._summed)
            index, room = open_.get(key, (-1, 0.0))
            if index < 0 or size > room:
                room = BUCKET_BYTES if key in open_ else FIRST_BUCKET_BYTES
                index = len(made)
                made.append(Bucket(axes, len(self.paths), 0.0))
            ready = min(self.uses[entry.name])  # backward goes through the blocks from the last to the first
            made[index] = Bucket(axes, min(made[index].block, ready), made[index].bytes + size)
            open_[key] = index, room - size
        return tuple(made)

    def _bytes(self, entries: Iterable[State], dtype: str) -> float:
        """Of one rank, before ZeRO, if every floating tensor has ``dtype`` ("": its own)."""
        total = 0.0
        for entry in entries:
            itemsize = getattr(torch, dtype).itemsize if dtype and entry.value.dtype.is_floating_point else entry.value.dtype.itemsize
            total += float(local_bytes(entry, self.program)) / entry.value.dtype.itemsize * itemsize
        return total

    @property
    def _gathered(self) -> str:
        """The dtype in which units are gathered: that of products under autocast, else that of the parameters."""
        narrow = self.precision.compute if self.precision.compute in _NARROW else ""
        return narrow if narrow and not self.precision.master else kept_dtype(self.precision)

    @property
    def _summed(self) -> str:
        return self.precision.gradients or kept_dtype(self.precision)


def kept_dtype(precision: Precision) -> str:
    """What the model holds of a parameter; "": as it is declared."""
    return precision.parameters or ("" if precision.compute in _NARROW else precision.compute)


def is_trained(entry: State) -> bool:
    return entry.kind == "parameter" and entry.value.requires_grad


def summed_over(entry: State) -> tuple[str, ...]:
    """Axes over which the runtime sums a parameter's gradient."""
    return tuple(axis for axis, placement in entry.value.placements if isinstance(placement, Replicated))


def _uses(program: Program) -> dict[str, set[int]]:
    """Name of a state -> positions of the blocks that read it, in order of first use."""
    found: dict[str, set[int]] = {}
    for position, block in enumerate(program.blocks()):
        for node in block.node.all_input_nodes:
            if node.op == "get_attr":
                found.setdefault(str(node.target).removeprefix(STATE), set()).add(position)
    return found

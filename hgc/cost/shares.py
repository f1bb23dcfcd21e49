"""How much of each parameter a rank holds, in which dtype, and which parameters travel together: as the runtime has it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import sympy
import torch

from hgc.cost.dtypes import StepDtypes, dtypes_of
from hgc.cost.execution import EAGER, Execution
from hgc.cost.symbolic import ZERO
from hgc.ir.placement import Invariant, Replicated
from hgc.ir.program import STATE, Program, State
from hgc.ir.value import Size
from hgc.plan import Precision
from hgc.runtime.reducer import BUCKET_BYTES, FIRST_BUCKET_BYTES
from hgc.strategy import Strategy

DATA_AXES = ("dp", "cp", "sp")
"""Axes over which parameters are whole and gradients are summed by the runtime."""
_REPEATED = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True)
class Unit:
    """Parameters that ZeRO gathers and scatters as one. ``gathered``: the dtype in which they are whole, ``None`` for their own."""

    name: str
    entries: tuple[State, ...]
    gathered: torch.dtype | None


class Shares:
    """The parameters of a lowered program on the fullest rank, under a strategy (its ``zero``) and a precision.

    ``sharded`` entries are split over the data axes by ``units``, everything else is kept whole and, if trained, summed in buckets.
    """

    def __init__(self, program: Program, strategy: Strategy, precision: Precision | None = None, execution: Execution = EAGER) -> None:
        self.program, self.zero = program, strategy.zero
        self.dtypes: StepDtypes = dtypes_of(precision or Precision(), execution)
        self.axes = tuple(axis for axis in program.mesh if axis in DATA_AXES)
        self.ranks = int(sympy.prod([program.mesh[axis] for axis in self.axes]))
        self.parameters = [entry for entry in program.state.values() if entry.kind == "parameter"]
        self.trained = [entry for entry in self.parameters if entry.value.requires_grad]
        self.units = self._find_units() if self.zero and self.axes else []
        self._sharded = {entry.name for unit in self.units for entry in unit.entries}

    def is_sharded(self, entry: State) -> bool:
        return entry.name in self._sharded

    def local_shape(self, entry: State) -> tuple[Size, ...]:
        return entry.value.local_shape(self.program.mesh)

    def local_numel(self, entry: State) -> Size:
        """Elements of a rank's part as the graph has it, before ZeRO."""
        return sympy.Mul(*self.local_shape(entry))

    def held_numel(self, entry: State) -> Size:
        """What the fullest rank keeps between steps: of what is sharded the first part of dim 0, rounded up."""
        if not self.is_sharded(entry):
            return self.local_numel(entry)
        first, *rest = self.local_shape(entry)
        return sympy.Mul(sympy.ceiling(first / self.ranks), *rest)

    def padded_numel(self, entry: State) -> Size:
        """What a gather of it moves: as many full parts as there are ranks."""
        return self.held_numel(entry) * self.ranks

    def summed_axes(self, entry: State) -> tuple[str, ...]:
        """Data axes over which the runtime sums its gradient. A frozen parameter counts as summed where it is whole."""
        kinds = (Replicated(),) if entry.value.requires_grad else (Replicated(), Invariant())
        return tuple(axis for axis in self.axes if entry.value.on(axis) in kinds)

    def kept(self, entry: State) -> int:
        """Bytes of an element as the model computes with it, ``stored`` as the optimizer updates it, ``summed`` as gradients are."""
        return self.dtypes.kept(entry.value.dtype, len(entry.value.shape)).itemsize

    def stored(self, entry: State) -> int:
        """See :meth:`kept`."""
        return self.dtypes.stored(entry.value.dtype, len(entry.value.shape)).itemsize

    def summed(self, entry: State) -> int:
        """See :meth:`kept`."""
        return self.dtypes.summed(entry.value.dtype, len(entry.value.shape)).itemsize

    def has_copy(self, entry: State) -> bool:
        """Does the optimizer update another tensor than the one that the model computes with?"""
        return not self.is_sharded(entry) and self.stored(entry) != self.kept(entry)

    def gathered(self, entry: State, unit: Unit) -> int:
        return unit.gathered.itemsize if unit.gathered is not None else self.stored(entry)

    def gathered_bytes(self, unit: Unit) -> Size:
        """What a gather of the unit's parameters moves."""
        return add(self.padded_numel(entry) * self.gathered(entry, unit) for entry in unit.entries)

    def summed_bytes(self, unit: Unit) -> Size:
        """What the sum of the unit's gradients moves."""
        return add(self.padded_numel(entry) * self.summed(entry) for entry in unit.entries if entry.value.requires_grad)

    # -- groups ------------------------------------------------------------------------------------------------------------------------

    def _find_units(self) -> list[Unit]:
        """The root unit first, then each repeated block; blocks that share a parameter join the root, as in ``hgc.runtime.fsdp``."""
        uses: dict[str, set[str]] = {}
        for block in self.program.blocks():
            for node in block.node.all_input_nodes:
                if node.op == "get_attr":
                    uses.setdefault(str(node.target).removeprefix(STATE), set()).add(block.path)
        shared = {path for paths in uses.values() if len(paths) > 1 for path in paths}
        dtypes = self.dtypes
        whole = dtypes.parameters if dtypes.master is not None else None
        in_blocks = whole if dtypes.wide_vectors or dtypes.autocast is None else dtypes.autocast
        least_dims = {False: 2 if dtypes.wide_vectors else 1, True: 1 if dtypes.autocast is None else 2}  # by "is a block"
        members: dict[str, list[State]] = {"": []}
        for entry in self.parameters:
            paths = uses.get(entry.name, set())
            alone = len(paths) == 1 and not paths & shared and _REPEATED.search(next(iter(paths)))
            name = next(iter(paths)) if alone else ""
            if self.summed_axes(entry) == self.axes and len(self.local_shape(entry)) >= least_dims[bool(name)]:
                members.setdefault(name, []).append(entry)
        return [Unit(name, tuple(found), in_blocks if name else whole) for name, found in members.items()]

    def buckets(self) -> list[tuple[tuple[str, ...], list[State]]]:
        """Axes and parameters of each bucket, in the order in which backward fills them."""
        found: list[tuple[tuple[str, ...], list[State]]] = []
        opened: dict[tuple[tuple[str, ...], torch.dtype], tuple[list[State], int]] = {}
        for entry in reversed(self.trained):
            axes = self.summed_axes(entry)
            if not axes or self.is_sharded(entry):
                continue
            key = (axes, self.dtypes.summed(entry.value.dtype, len(entry.value.shape)))
            size = int(self.local_numel(entry)) * self.summed(entry)
            bucket, room = opened.get(key, (None, 0))
            if bucket is None or size > room:
                bucket, room = [], BUCKET_BYTES if key in opened else FIRST_BUCKET_BYTES
                found.append((axes, bucket))
            bucket.append(entry)
            opened[key] = bucket, room - size
        return found

    def bucket_bytes(self, bucket: Iterable[State]) -> int:
        """Gradients, and a flag for each of them."""
        return sum((int(self.local_numel(entry)) + 1) * self.summed(entry) for entry in bucket)


def add(sizes: Iterable[Size]) -> Size:
    return sympy.Add(ZERO, *sizes)

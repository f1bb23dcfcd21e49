"""What an emitted program says about itself: mesh, inputs, sizes, and how its parameters are kept in step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from hgc.errors import PlanError
from hgc.ir.placement import Shard, parse_placement
from hgc.plan import Precision
from hgc.strategy import ZERO_STAGES


@dataclass(frozen=True)
class Symbol:
    """A size that batches may choose: its meaning (``"batch"``, ``"sequence"``), the range found legal, and the size used by default."""

    meaning: str
    low: int = 1
    high: int | None = None
    default: int = 1


@dataclass(frozen=True)
class Input:
    """One tensor of a batch: global shape (numbers, symbol names or expressions in them), dtype, and the axes where it is sharded.

    Synthetic batches draw integers from ``[low, high)`` and floats from a normal distribution; booleans are true.
    """

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    placements: Mapping[str, str] = field(default_factory=dict)
    low: int = 0
    high: int = 2

    def shards(self) -> list[tuple[str, Shard]]:
        """``(axis, placement)`` for each axis where the input is sharded, in mesh order."""
        return sharded_axes(self.placements)


@dataclass(frozen=True)
class PlanInfo:
    """How the program is distributed. Raises ``PlanError`` for a plan that contradicts itself.

    ``zero``: what is sharded over the data axes, 1 optimizer state, 2 gradients too, 3 parameters too. ``precision`` and ``micro_batches``
    are what a :class:`~hgc.runtime.Trainer` takes if it is told nothing else.
    """

    mesh: Mapping[str, int]
    inputs: Mapping[str, Input]
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    zero: int = 0
    data_axes: tuple[str, ...] = ()
    tied: Mapping[str, str] = field(default_factory=dict)
    constants: str | None = None
    assumptions: tuple[str, ...] = ()
    precision: Precision = field(default_factory=Precision)
    micro_batches: int = 1

    def __post_init__(self) -> None:
        if self.zero not in ZERO_STAGES:
            raise PlanError(f"zero={self.zero} is not a way to keep state; use 0 (replicated), 1, 2 or 3 (fully sharded)")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches={self.micro_batches} leaves no batch; use 1 or more")
        unknown = [axis for axis in self.data_axes if axis not in self.mesh]
        if unknown:
            raise PlanError(f"data axis {unknown[0]!r} is no axis of the mesh {describe_mesh(self.mesh)}; name one of {list(self.mesh)}")

    @property
    def world(self) -> int:
        """Number of processes."""
        return math.prod(self.mesh.values())

    @property
    def summed_axes(self) -> tuple[str, ...]:
        """Data axes with at least two ranks, in mesh order."""
        return tuple(axis for axis, size in self.mesh.items() if axis in self.data_axes and size > 1)

    def symbol(self, meaning: str) -> str | None:
        """The name of the symbol with this meaning, if the program leaves that size open."""
        return next((name for name, symbol in self.symbols.items() if symbol.meaning == meaning), None)


@dataclass(frozen=True)
class Normal:
    """Initial values drawn from a normal distribution around zero."""

    std: float = 0.02


def describe_mesh(mesh: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in mesh.items()) or "of one process"


def sharded_axes(placements: Mapping[str, str]) -> list[tuple[str, Shard]]:
    """Parse placements such as ``{"dp": "S(0)", "tp": "R"}``; whole placements are dropped. Raises ``PlanError``."""
    found = []
    for axis, text in placements.items():
        try:
            placement = parse_placement(text)
        except ValueError as error:
            raise PlanError(f"axis {axis!r}: {error}") from None
        if isinstance(placement, Shard):
            found.append((axis, placement))
    return found

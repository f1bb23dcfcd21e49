"""What a placement costs beyond its own collectives: work done twice, and values split where they must be exchanged later."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from hgc.ir.input_sizes import evaluate
from hgc.ir.placement import Partial, Placement, Shard, is_whole, zigzag_runs
from hgc.ir.rules import Call, Case
from hgc.ir.rules.attention import RING
from hgc.ir.value import Size
from hgc.passes.sharding.layout import AxisLayout

_REDUNDANT = 2.0
"""Bytes that a byte counts for which varies over the batch and is computed alike on every rank of an axis that splits the batch."""

_ASTRAY = 1e-2
"""The same for what is split along another dim than the batch: it must be exchanged sooner or later."""


@dataclass(frozen=True)
class Preferences:
    """Prices in bytes, for one axis. ``hints`` as for :func:`hgc.passes.sharding.lower.lower_axis`."""

    layout: AxisLayout
    hints: Mapping[sympy.Symbol, int]

    def cost(self, call: Call, case: Case, makes_mask: bool) -> float:
        """``makes_mask``: the result is (part of) the mask or bias of an attention."""
        if not self.layout.divided:
            return 0.0
        total = 0.0
        for operand, wanted in zip(call.operands, case.inputs, strict=True):
            if is_whole(operand.found) and self.is_astray(operand.shape, wanted):
                total += self.size_bytes(operand.shape, operand.dtype.itemsize) * 2 * _REDUNDANT  # cutting it so would save nothing
        summands = any(isinstance(operand.found, Partial) for operand in call.operands)
        for shape, placement in zip(call.outputs, case.outputs, strict=True):
            size_bytes = self.size_bytes(shape, 4)
            if isinstance(placement, Partial):
                total += 0.0 if summands else 2 * size_bytes  # new summands, which somebody must sum
            elif self.layout.methods and not call.operands:
                total += 0.0 if is_whole(placement) else size_bytes  # a constant is made again in the shape in which it is needed
            elif makes_mask:
                total += size_bytes * self._mask_factor(shape, placement)
            elif any(map(self.is_divided, shape)):
                total += size_bytes * (_REDUNDANT if is_whole(placement) else _ASTRAY if self.is_astray(shape, placement) else 0.0)
        return total

    def _mask_factor(self, shape: tuple[Size, ...], placement: Placement) -> float:
        """Every rank needs all columns of a mask: what only has these is whole, and in a ring its rows are split."""
        dims = [dim for dim, size in enumerate(shape) if self.is_divided(size)]
        if len(dims) > 1 and RING in self.layout.methods:
            return (
                0.0
                if isinstance(placement, Shard) and placement.dim == dims[0] and self._in_order(shape[dims[0]], placement)
                else _REDUNDANT
            )
        return 0.0 if is_whole(placement) else _REDUNDANT

    def is_divided(self, size: Size) -> bool:
        """Does it vary over what the axis is there to divide?"""
        return bool(size.free_symbols & self.layout.divided)

    def is_astray(self, shape: tuple[Size, ...], placement: Placement) -> bool:
        """Split along another dim than those that the axis is there to divide, or in another order?"""
        if not isinstance(placement, Shard) or not any(map(self.is_divided, shape)):
            return False
        return not self.is_divided(shape[placement.dim]) or not self._in_order(shape[placement.dim], placement)

    def _in_order(self, size: Size, shard: Shard) -> bool:
        """Are the positions of each sequence along a dim of this size cut as those of the inputs?"""
        if not self.layout.methods:
            return True
        runs = zigzag_runs(shard.parts) if self.layout.zigzag else shard.parts
        if not isinstance(runs, int | sympy.Expr):
            return False
        return any((size / (runs * symbol)).is_Rational for symbol in size.free_symbols & self.layout.divided)

    def size_bytes(self, shape: tuple[Size, ...], item: int) -> float:
        """Bytes of a tensor whose elements take ``item`` each, for the hints."""
        return float(math.prod(int(evaluate(size, self.hints)) for size in shape)) * item

"""Pointwise operators: every output element depends on the same element of each (broadcast) operand."""

from __future__ import annotations

from collections.abc import Iterator

from hgc.ir import ops
from hgc.ir.placement import Placement, Shard
from hgc.ir.rules.by_expert import is_order
from hgc.ir.rules.core import PARTIAL, Call, Case, Operand, append_axis, overloads, rule, strided_inputs

_SUMS = set(overloads("add.Tensor", "sub.Tensor"))
_PRODUCTS = set(overloads("mul.Tensor"))
_QUOTIENTS = set(overloads("div.Tensor"))
_LINEAR_UNARY = set(overloads("neg", "clone", "contiguous", "mul.Scalar", "div.Scalar", "zeros_like", "detach"))
_CASTS = set(overloads("to.dtype"))
_UNTAGGED = overloads(
    "__and__.Tensor",
    "__or__.Tensor",
    "__xor__.Tensor",
    "__and__.Scalar",
    "__or__.Scalar",
    "masked_fill.Tensor",
    "floor_divide",
    "floor_divide.Scalar",
    "fmod.Tensor",
    "fmod.Scalar",
    "where.ScalarSelf",
    "where.ScalarOther",
    "where.Scalar",
    "hardswish",
    "log_sigmoid",
    "isfinite",
    "isnan",
    "to.dtype",
    "contiguous",
    "zeros_like",
    "ones_like",
    "full_like",
    "fill.Scalar",
    "detach",
)
"""Pointwise operators that torch does not tag so."""


def sharded(call: Call, dims: range | None = None) -> Iterator[Case]:
    """Output dim ``d`` sharded: operands that have it are sharded there, operands that broadcast over it are whole."""
    rank = len(call.shape)
    for dim in dims if dims is not None else range(rank):
        placed = _aligned(call, dim)
        if placed and call.divides(call.shape[dim]):
            yield call.case(placed, Shard(dim))


def _aligned(call: Call, dim: int) -> dict[int, Placement]:
    placed: dict[int, Placement] = {}
    for operand in call.operands:
        own = dim - (len(call.shape) - operand.rank)
        if own >= 0 and operand.shape[own] == call.shape[dim]:
            placed[operand.index] = Shard(own)
    return placed


def strided(call: Call) -> Iterator[Case]:
    """A strided shard passes if every operand with that dim carries the same one (the ranks' rows are permuted alike)."""
    for operand, found in strided_inputs(call):
        if is_order(found):
            continue
        dim = found.dim + len(call.shape) - operand.rank
        own = {i: Shard(p.dim, found.parts) for i, p in _aligned(call, dim).items() if isinstance(p, Shard)}
        if own:
            yield call.case(own, Shard(dim, found.parts))


@rule("pointwise", *_UNTAGGED)
def pointwise(call: Call) -> Iterator[Case]:
    yield call.all_whole()
    yield from sharded(call)
    yield from strided(call)
    yield from _partial(call)


def _partial(call: Call) -> Iterator[Case]:
    """Sums pass through what is linear in them."""
    count = len(call.operands)
    if not all(operand.dtype.is_floating_point for operand in call.operands):
        return
    if count == 2 and call.target in _SUMS:
        yield call.case({0: PARTIAL, 1: PARTIAL}, PARTIAL)
    if count == 2 and call.target in _PRODUCTS | _QUOTIENTS:
        yield call.case({0: PARTIAL}, PARTIAL)
    if count == 2 and call.target in _PRODUCTS:
        yield call.case({1: PARTIAL}, PARTIAL)
    if count == 1 and _linear_in_its_tensor(call):
        yield call.case({0: PARTIAL}, PARTIAL)


def _linear_in_its_tensor(call: Call) -> bool:
    if call.target in _LINEAR_UNARY:
        return True
    if call.target in _CASTS:
        return bool(call["dtype"].is_floating_point)  # rounding to integers is not linear
    if call.target in _PRODUCTS:
        return True
    return call.target in _QUOTIENTS and isinstance(call["self"], Operand)


@rule(ops.dropout)
def dropout(call: Call) -> Iterator[Case]:
    """Masks differ between ranks exactly where the tensor is sharded."""
    split = [*sharded(call), *strided(call)]
    if call.axis in call["random_axes"]:
        yield from split
        return
    yield call.all_whole()
    for case in split:
        yield Case(case.inputs, case.outputs, append_axis("random_axes"))

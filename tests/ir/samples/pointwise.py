"""Pointwise operators: those with a rule of their own, and many that have it by their tag."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hgc.ir import ops
from tests.ir.rule_harness import Sample
from tests.ir.samples.registry import Draw, sample

aten = torch.ops.aten

_UNARY = """neg abs exp expm1 sin cos tanh sigmoid relu relu6 silu gelu erf softplus elu leaky_relu hardtanh hardsigmoid hardswish mish
selu celu log_sigmoid square sgn sign floor ceil round trunc exp2 isnan isinf isfinite nan_to_num clone contiguous detach zeros_like
ones_like hardshrink softshrink logical_not atan reciprocal""".split()
_POSITIVE = "log log2 log1p sqrt rsqrt".split()
_COMPARISONS = [getattr(aten, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")]
_BROADCAST = [aten.maximum.default, aten.minimum.default, aten.atan2.default, aten.logaddexp.default, *(op.Tensor for op in _COMPARISONS)]
_LOGICAL = [aten.logical_and.default, aten.logical_or.default, aten.logical_xor.default]
_BITWISE = [
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
    *(getattr(aten, f"__{n}__").Tensor for n in ("and", "or", "xor")),
]


@sample(*(getattr(aten, name).default for name in _UNARY))
def unary(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)),))


@sample(*(getattr(aten, name).default for name in _POSITIVE))
def positive(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.positive(*d.shape(0)),))


def broadcast(d: Draw) -> tuple[list[int], list[int]]:
    """Two shapes that broadcast, the first at least as long."""
    full = d.shape()
    other = [1 if d.some(3) else size for size in full[d.pick(*range(len(full) + 1)) :]]
    first = [1 if d.some(4) else size for size in full]
    return first, other


def pair(d: Draw, low: float = -1.0) -> tuple[Tensor, Tensor]:
    first, other = broadcast(d)
    a, b = d.real(*first, low=low), d.real(*other, low=low)
    return (a, b) if d.some() else (b, a)


@sample(*_BROADCAST)
def broadcasting(d: Draw, target: Any) -> Sample:
    return Sample(target, pair(d))


@sample(aten.pow.Tensor_Tensor, aten.div.Tensor, aten.fmod.Tensor, aten.remainder.Tensor)
def broadcasting_positive(d: Draw, target: Any) -> Sample:
    return Sample(target, pair(d, 0.1))


@sample(aten.floor_divide.default)
def floor_divide(d: Draw, target: Any) -> Sample:
    first, other = broadcast(d)
    return Sample(target, (d.ints(9, *first), d.ints(3, *other) + 1))


@sample(aten.div.Tensor_mode)
def rounded_quotient(d: Draw, target: Any) -> Sample:
    return Sample(target, pair(d, 0.1), {"rounding_mode": d.pick("floor", "trunc")})


@sample(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor)
def arithmetic(d: Draw, target: Any) -> Sample:
    scale = {} if target is aten.mul.Tensor or d.some() else {"alpha": 2}
    if d.some(3):
        x = d.real(*d.shape())
        return Sample(target, (x, x), scale)
    return Sample(target, pair(d), scale)


@sample(aten.mul.Tensor, aten.div.Tensor, aten.add.Tensor, aten.sub.Tensor)
def with_number(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)), 1.5))


@sample(aten.mul.Tensor, aten.add.Tensor)
def with_integers(d: Draw, target: Any) -> Sample:
    first, other = broadcast(d)
    return Sample(target, (d.ints(5, *first), d.real(*other)))


@sample(
    aten.mul.Scalar,
    aten.div.Scalar,
    aten.add.Scalar,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.pow.Tensor_Scalar,
    *(op.Scalar for op in _COMPARISONS),
)
def scalar(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)), 2))


@sample(aten.fill.Scalar, aten.full_like.default, aten.clamp_min.default, aten.clamp_max.default, aten.fmod.Scalar, aten.remainder.Scalar)
def filled(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)), 0.4))


@sample(aten.floor_divide.Scalar, aten.__and__.Scalar, aten.__or__.Scalar)
def integer_scalar(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.ints(9, *d.shape(0)), 2))


@sample(aten.pow.Scalar)
def power_of_number(d: Draw, target: Any) -> Sample:
    return Sample(target, (2.0, d.real(*d.shape(0))))


@sample(aten.clamp.default, aten.threshold.default)
def two_numbers(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)), -0.5, 0.5))


@sample(*_LOGICAL, *_BITWISE)
def logical(d: Draw, target: Any) -> Sample:
    first, other = broadcast(d)
    return Sample(target, (d.flags(*first), d.flags(*other)))


@sample(aten.bitwise_not.default)
def inverted(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.flags(*d.shape(0)),))


@sample(aten.where.self)
def where(d: Draw, target: Any) -> Sample:
    first, other = broadcast(d)
    return Sample(target, (d.flags(*other), d.real(*first), d.real(*other)))


@sample(aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar)
def where_number(d: Draw, target: Any) -> Sample:
    first, other = broadcast(d)
    x = d.real(*other)
    numbers = {aten.where.ScalarSelf: (0.5, x), aten.where.ScalarOther: (x, 0.5), aten.where.Scalar: (0.5, 1.5)}
    return Sample(target, (d.flags(*first), *numbers[target]))


@sample(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(d: Draw, target: Any) -> Sample:
    first, other = broadcast(d)
    return Sample(target, (d.real(*first), d.flags(*other), 0.5 if target is aten.masked_fill.Scalar else d.real()))


@sample(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(d: Draw, target: Any) -> Sample:
    a, b = pair(d)
    return Sample(target, (a, b, 0.3 if target is aten.lerp.Scalar else d.real(*a.shape)))


@sample(aten.addcmul.default, aten.addcdiv.default)
def products(d: Draw, target: Any) -> Sample:
    a, b = pair(d, 0.1)
    return Sample(target, (d.real(*a.shape), a, b), {"value": 0.5})


@sample(aten.to.dtype)
def cast(d: Draw, target: Any) -> Sample:
    x = d.ints(9, *d.shape(0)) if d.some() else d.real(*d.shape(0))
    return Sample(target, (x, d.pick(torch.float64, torch.int64, torch.bool, torch.int32)))


@sample(ops.dropout)
def dropout(d: Draw, target: Any) -> Sample:
    """Next to nothing is dropped: that masks differ along the right axes is tests/ir/test_ops_random.py's to show."""
    return Sample(target, (d.real(*d.shape()), 1e-300), {"random_axes": ("ax",)} if d.some() else {})

"""Operators that move elements or make them."""

from __future__ import annotations

import operator
from typing import Any

import sympy
import torch

from hgc.ir.placement import Shard
from tests.ir.rule_harness import Sample
from tests.ir.samples.registry import Draw, sample

aten = torch.ops.aten


@sample(aten.transpose.int)
def transpose(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape)), d.dim(len(shape))))


@sample(aten.permute.default)
def permute(d: Draw, target: Any) -> Sample:
    shape = d.shape(2)
    dims = d.pick([1, 0], [-1, 0]) if len(shape) == 2 else d.pick([0, 2, 1], [2, 0, 1], [1, 2, 0], [-1, 1, 0])
    return Sample(target, (d.real(*shape), dims))


@sample(aten.t.default)
def t(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0, 2)),))


@sample(aten.numpy_T.default, aten.mT.default)
def matrix_transpose(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(d.size(), d.size()) if target is aten.numpy_T.default else d.real(*d.shape(2)),))


@sample(aten.alias.default)
def alias(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)),))


@sample(aten.movedim.int)
def movedim(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape)), d.dim(len(shape))))


@sample(aten.unsqueeze.default)
def unsqueeze(d: Draw, target: Any) -> Sample:
    shape = d.shape(0)
    return Sample(target, (d.real(*shape), d.dim(len(shape) + 1)))


@sample(aten.squeeze.dim, aten.squeeze.dims)
def squeeze(d: Draw, target: Any) -> Sample:
    """Of a dim that is one, or of one that becomes one on a rank."""
    shape = d.shape()
    dim = d.dim(len(shape))
    shape[dim] = d.pick(1, d.ranks, shape[dim])
    return Sample(target, (d.real(*shape), dim if target is aten.squeeze.dim else [dim]))


@sample(aten.view_as_complex.default)
def view_as_complex(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0, 2), 2, grad=False),))


@sample(aten.view_as_real.default)
def view_as_real(d: Draw, target: Any) -> Sample:
    shape = d.shape(0, 2)
    return Sample(target, (torch.complex(d.real(*shape, grad=False), d.real(*shape, grad=False)),))


@sample(aten.expand.default, aten.broadcast_to.default)
def expand(d: Draw, target: Any) -> Sample:
    full = d.shape()
    own = [1 if d.some() else size for size in full[d.pick(*range(len(full) + 1)) :]]
    shift = len(full) - len(own)
    sizes = [
        -1 if target is aten.expand.default and dim >= shift and own[dim - shift] == size and d.some() else size
        for dim, size in enumerate(full)
    ]
    return Sample(target, (d.real(*own), sizes))


@sample(aten.zeros.default, aten.ones.default, aten.full.default)
def constant(d: Draw, target: Any) -> Sample:
    value = (0.5,) if target is aten.full.default else ()
    return Sample(target, (d.shape(0), *value), {"dtype": torch.float64})


@sample(aten.reshape.default, aten.view.default, aten._unsafe_view.default)
def reshape(d: Draw, target: Any) -> Sample:
    a, b, c = d.size(), d.size(), d.even()
    before, after = d.pick(
        ([a, b, c], [a * b, c]),
        ([a * b, c], [a, b, c]),
        ([a, b, c], [a, b * c]),
        ([a, b * c], [a, b, c]),
        ([a, b, c], [a * b * c]),
        ([a * b * c], [a, b, c]),
        ([a * b, c], [a * b, 1, c]),
        ([a, 1, b], [a, b]),
        ([a, b * c], [a * b, c]),
        ([a, b, 2 * c], [a, b, c, 2]),
        ([1, a, b], [a, 1, b]),
        ([a, b], [b, a]),
        ([a, b, c, 3], [a * b, c * 3]),
        ([a, b, 2 * c], [a * b * 2, c]),
        ([a * b, 2 * c], [a, b * 2, c]),
        ([a, b, c], [a, c, b]),
        ([a, b], [a, b]),
    )
    return Sample(target, (d.real(*before), after))


B, T = sympy.symbols("B T", integer=True, positive=True)


@sample(aten.reshape.default)
def symbolic_reshape(d: Draw, target: Any) -> Sample:
    """Batch and sequence as tracing has them; a flattened sequence is a strided shard with as many parts as the batch has rows."""
    b, t, h, n = 4 * d.ranks, 5 * d.ranks, 7, d.ranks
    symbols = {b: B, t: T, b * t: B * T, b * n: B * n}
    before, after = d.pick(
        ([b, t, h], [b * t, h]),
        ([b * t, h], [b, t, h]),
        ([b, t, n * h], [b, t, n, h]),
        ([b, t, n, h], [b, t, n * h]),
        ([b * t, n * h], [b * t, n, h]),
        ([b, t], [b * t]),
        ([b, t], [1, b, t]),
        ([t, b, n * h], [t, b * n, h]),
        ([b * n, t, h], [b, n, t, h]),
    )
    sizes = [-1 if size in symbols and d.some(3) and after.count(size) == 1 and i == 0 else size for i, size in enumerate(after)]
    carrier = d.real(b, t, grad=False)
    return Sample(target, (d.real(*before), sizes), symbols=symbols, hints={B: b, T: t}, found=(Shard(0, B),), carriers=(carrier,))


@sample(aten.flatten.using_ints)
def flatten(d: Draw, target: Any) -> Sample:
    start, end = d.pick((0, 1), (1, 2), (0, 2), (0, -1), (-2, -1))
    return Sample(target, (d.real(d.size(), d.size(), d.size()), start, end))


@sample(aten.slice.Tensor)
def slices(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    start, end, step = d.pick(
        (0, 1, 1), (1, 2**63 - 1, 1), (0, 2**63 - 1, 2), (None, -1, 1), (0, shape[dim] // 2, 1), (shape[dim] // 2, 2**63 - 1, 1)
    )
    return Sample(target, (d.real(*shape), dim, start, end, step))


@sample(aten.slice.Tensor)
def slice_of_part(d: Draw, target: Any) -> Sample:
    """One of three equal parts, or of unequal ones, as fused projections have them."""
    n = d.ranks
    parts = d.pick((2 * n, 2 * n, 2 * n), (3 * n, n, 2 * n))
    at = d.pick(0, 1, 2)
    start, end = sum(parts[:at]), sum(parts[: at + 1])
    found = Shard(1, 3) if len(set(parts)) == 1 else Shard(1, parts)
    return Sample(target, (d.real(d.size(), sum(parts)), d.pick(1, -1), start, end if at < 2 or d.some() else 2**63 - 1), found=(found,))


@sample(aten.select.int)
def select(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape)), d.pick(0, -1)))


@sample(aten.narrow.default)
def narrow(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    return Sample(target, (d.real(*shape), dim, 0, max(shape[dim] // 2, 1)))


@sample(aten.constant_pad_nd.default, aten.pad.default)
def pad(d: Draw, target: Any) -> Sample:
    shape = d.shape(2)
    amounts = d.pick([1, 1], [0, 2], [0, 0, 1, 0], [1, 0, 0, 1], [0, 0])
    mode = ("constant",) if target is aten.pad.default else ()
    return Sample(target, (d.real(*shape), amounts, *mode, d.pick(0.0, 1.5)))


@sample(aten.pad.default)
def reflect(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(d.size(), d.size(), 4), [1, 1], d.pick("reflect", "replicate", "circular")))


@sample(aten.flip.default)
def flip(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), [d.dim(len(shape))]))


@sample(aten.roll.default)
def roll(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), [1], d.pick([], [d.dim(len(shape))])))


@sample(aten.tril.default, aten.triu.default)
def triangle(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(2)), d.pick(0, 1, -1)))


@sample(aten.slice_scatter.default)
def slice_scatter(d: Draw, target: Any) -> Sample:
    shape = [*d.shape(0, 2), 4]
    dim = d.pick(-1, len(shape) - 1)
    if d.some(3):
        return Sample(target, (d.real(*shape), d.real(*shape), d.pick(dim, 0), 0, 2**63 - 1, 1))
    return Sample(target, (d.real(*shape), d.real(*shape[:-1], 2), dim, *d.pick((0, 2, 1), (2, 4, 1), (0, 4, 2), (2, 2**63 - 1, 1))))


@sample(aten.select_scatter.default)
def select_scatter(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    rest = [size for i, size in enumerate(shape) if i != dim % len(shape)]
    return Sample(target, (d.real(*shape), d.real(*rest), dim, d.pick(0, -1)))


@sample(aten.unfold.default)
def unfold(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    shape[dim] = 4
    return Sample(target, (d.real(*shape), dim, 2, 2))


@sample(aten.repeat_interleave.self_int)
def repeat_interleave(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), 2, d.pick(None, d.dim(len(shape)))))


@sample(aten.repeat.default)
def repeat(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), [d.pick(1, 2) for _ in range(len(shape) + d.pick(0, 1))]))


@sample(aten.cat.default, aten.stack.default)
def join(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape) + (target is aten.stack.default))
    tensors = [d.real(*shape) for _ in range(d.pick(1, 2, 3))]
    if target is aten.cat.default:
        sizes = list(shape)
        sizes[dim] = d.pick(d.ranks, 3 * d.ranks, 1)
        tensors.append(d.real(*sizes))
    return Sample(target, (tensors, dim))


@sample(aten.split.Tensor, aten.chunk.default)
def split(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    shape[dim] = d.pick(3 * d.ranks, 2 * d.ranks, 5)
    pieces = d.pick(2, 3)
    return Sample(target, (d.real(*shape), pieces if target is aten.chunk.default else max(shape[dim] // pieces, 1), dim))


@sample(aten.split_with_sizes.default)
def split_with_sizes(d: Draw, target: Any) -> Sample:
    n = d.ranks
    sizes = d.pick([n, n, n], [2 * n, n], [1, 2])
    shape = d.shape()
    dim = d.dim(len(shape))
    shape[dim] = sum(sizes)
    return Sample(target, (d.real(*shape), sizes, dim), found=(Shard(dim % len(shape), tuple(sizes)),) if sizes[0] > 1 else ())


@sample(aten.unbind.int)
def unbind(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape))))


@sample(operator.getitem)
def getitem(d: Draw, target: Any) -> Sample:
    """Of one tensor: its first row, whole; pieces of a split are placed with the split."""
    return Sample(target, (d.real(*d.shape()), 0))


@sample(aten.arange.default, aten.eye.default)
def counted(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.size(),))


@sample(aten.arange.start, aten.arange.start_step, aten.linspace.default)
def counted_from(d: Draw, target: Any) -> Sample:
    return Sample(target, {aten.arange.start: (1, 6), aten.arange.start_step: (0, 6, 2)}.get(target, (0.0, 1.0, 5)))

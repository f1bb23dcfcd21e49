"""Matrix products, convolutions, images and attention."""

from __future__ import annotations

from typing import Any

import torch

from hgc.ir.ops.attention import attention as attention_op
from hgc.ir.ops.moe import grouped_linear as grouped_linear_op
from tests.ir.rule_harness import Sample
from tests.ir.samples.registry import Draw, sample

aten = torch.ops.aten


@sample(aten.linear.default)
def linear(d: Draw, target: Any) -> Sample:
    inner, outer = d.size(), d.size()
    bias = (d.real(outer),) if d.some() else ()
    return Sample(target, (d.real(*d.shape(0, 2), inner), d.real(outer, inner), *bias))


@sample(aten.matmul.default)
def matmul(d: Draw, target: Any) -> Sample:
    rows, inner, columns = d.size(), d.size(), d.size()
    a, b = d.shape(0, 2), d.shape(0, 2)
    common = min(len(a), len(b))
    for i in range(1, common + 1):
        a[-i], b[-i] = d.pick((a[-i], a[-i]), (a[-i], 1), (1, b[-i]))
    if d.some():
        vector = d.real(inner)
        return Sample(target, d.pick((vector, d.real(*b, inner, columns)), (d.real(*a, rows, inner), vector), (vector, d.real(inner))))
    return Sample(target, (d.real(*a, rows, inner), d.real(*b, inner, columns)))


@sample(aten.mm.default)
def mm(d: Draw, target: Any) -> Sample:
    rows, inner, columns = d.size(), d.size(), d.size()
    return Sample(target, (d.real(rows, inner), d.real(inner, columns)))


@sample(aten.mm.default, aten.matmul.default)
def square(d: Draw, target: Any) -> Sample:
    """A matrix with itself: one placement for both operands."""
    x = d.real(d.even(), d.ranks)
    return Sample(target, (x, x)) if x.shape[0] == x.shape[1] else Sample(target, (x, d.real(d.ranks, 3)))


@sample(aten.bmm.default)
def bmm(d: Draw, target: Any) -> Sample:
    batch, rows, inner, columns = d.size(), d.size(), d.size(), d.size()
    return Sample(target, (d.real(batch, rows, inner), d.real(batch, inner, columns)))


@sample(aten.einsum.default)
def einsum(d: Draw, target: Any) -> Sample:
    equation = d.pick(
        "bij,bjk->bik", "bhd,bhd->bh", "bclgn,bshn->bhcls", "ij,kj->ik", "bi->b", "ij,jk,kl->il", "ab,cd->abcd", "bij,bjk -> bki"
    )
    terms = equation.replace(" ", "").split("->")[0].split(",")
    sizes = {letter: d.pick(d.ranks, 1, d.ranks, 3) for letter in "".join(terms)}
    return Sample(target, (equation, [d.real(*(sizes[letter] for letter in term)) for term in terms]))


def _convolution(d: Draw, dims: int, groups: int) -> tuple[tuple[Any, ...], list[int]]:
    channels, filters = groups * d.pick(1, d.ranks), groups * d.pick(1, d.ranks)
    image, kernel = [d.pick(4, 5) for _ in range(dims)], [d.pick(1, 3) for _ in range(dims)]
    x = d.real(d.size(), channels, *image) if not d.some(5) else d.real(channels, *image)
    bias = d.real(filters) if d.some() else None
    return (x, d.real(filters, channels // groups, *kernel), bias), kernel


@sample(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
def convolution(d: Draw, target: Any) -> Sample:
    dims = int(target._schema.name[-2])
    groups = d.pick(1, 1, d.ranks)
    args, kernel = _convolution(d, dims, groups)
    return Sample(target, (*args, d.pick([1], [2]), [k // 2 for k in kernel], [1], groups))


@sample(aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
def padded_convolution(d: Draw, target: Any) -> Sample:
    groups = d.pick(1, 1, d.ranks)
    args, _ = _convolution(d, int(target._schema.name[-2]), groups)
    return Sample(target, (*args, [1], d.pick("same", "valid"), [1], groups))


@sample(aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
def transposed_convolution(d: Draw, target: Any) -> Sample:
    dims = int(target._schema.name[-2])
    batch = [] if d.some(4) else [d.size()]
    return Sample(target, (d.real(*batch, d.ranks, *[3] * dims), d.real(d.ranks, 2, *[2] * dims), d.real(2), [2]))


@sample(aten.max_pool1d.default, aten.max_pool2d.default, aten.avg_pool1d.default, aten.avg_pool2d.default)
def pool(d: Draw, target: Any) -> Sample:
    dims = int(target._schema.name[-2])
    lead = [d.size()] if d.some(3) else [d.size(), d.size()]
    return Sample(target, (d.real(*lead, *[5] * dims), [2], [2]))


@sample(aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default)
def adaptive_pool(d: Draw, target: Any) -> Sample:
    dims = int(target._schema.name[-2])
    lead = [d.size()] if d.some(3) else [d.size(), d.size()]
    return Sample(target, (d.real(*lead, *[5] * dims), [d.pick(1, 2)] * dims))


@sample(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.upsample_bicubic2d.vec)
def upsample(d: Draw, target: Any) -> Sample:
    corners = () if target is aten.upsample_nearest2d.vec else (False,)
    return Sample(target, (d.real(d.size(), 2, 3, 3), [6, 6], *corners, None))


@sample(aten.pixel_shuffle.default)
def pixel_shuffle(d: Draw, target: Any) -> Sample:
    batch = [] if d.some(4) else [d.size()]
    return Sample(target, (d.real(*batch, 8, 2, 2), 2))


@sample(aten.im2col.default)
def im2col(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(d.size(), 2, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2]))


@sample(aten.grid_sampler.default)
def grid_sampler(d: Draw, target: Any) -> Sample:
    batch = d.size()
    return Sample(target, (d.real(batch, 2, 4, 4), d.real(batch, 3, 3, 2), 0, 0, False))


@sample(attention_op)
def attention(d: Draw, target: Any) -> Sample:
    batch, groups, length = d.size(), d.pick(1, d.ranks), d.pick(4, 2 * d.ranks, 2 * d.ranks)
    columns = d.pick(length, length, 2 * length)
    heads = groups * d.pick(1, 2, d.ranks)
    q, k, v = d.real(batch, heads, length, 3), d.real(batch, groups, columns, 3), d.real(batch, groups, columns, 2)
    shape = [d.pick(1, batch), d.pick(1, heads), length, columns]
    bias = d.pick(None, d.real(*shape), d.real(*shape[d.pick(1, 2) :], grad=False))
    if d.some(4):
        bias = d.flags(*shape) | torch.eye(length, columns, dtype=torch.bool)  # no row without a column to attend to
    sinks = d.real(heads) if d.some(3) else None
    softcap, window, causal = d.pick(0.0, 0.0, 2.0), d.pick(0, 2), d.some()
    random = ("ax",) if d.some(4) else ()
    return Sample(target, (q, k, v, bias, sinks, causal, window, 0.7, softcap, d.pick(0.0, 1e-300)), {"random_axes": random})


@sample(grouped_linear_op)
def grouped_linear(d: Draw, target: Any) -> Sample:
    experts, inner, outer, transposed = d.size(), d.size(), d.size(), d.some()
    weight = d.real(experts, *((inner, outer) if transposed else (outer, inner)))
    counts = d.ints(4, experts)
    counts[0] += 1
    return Sample(target, (d.real(int(counts.sum()), inner), weight, counts.cumsum(0).to(torch.int32), transposed))

"""Embeddings, cross entropy, and operators that address elements by integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hgc.ir import ops
from hgc.ir.ops.moe import moe_combine as moe_combine_op
from hgc.ir.ops.moe import moe_dispatch as moe_dispatch_op
from tests.ir.rule_harness import Sample
from tests.ir.samples.registry import Draw, sample

aten = torch.ops.aten


@sample(aten.embedding.default)
def embedding(d: Draw, target: Any) -> Sample:
    rows = d.even() * d.pick(1, 2)
    padding = d.pick(-1, 0, rows - 1)
    return Sample(target, (d.real(rows, d.size()), d.ints(rows, *d.shape(0, 2)), padding, d.some(6)))


@sample(ops.vocab_embedding)
def vocab_embedding(d: Draw, target: Any) -> Sample:
    rows = 2 * d.ranks
    return Sample(target, (d.real(rows, d.size()), d.ints(rows, *d.shape(0, 2)), d.pick(*d.axes)), {"padding_idx": d.pick(-1, 1)})


def classes(d: Draw) -> tuple[Tensor, Tensor, Tensor | None]:
    rows, count = d.size(), d.even()
    target = d.ints(count, rows)
    if rows > 1 and d.some():
        target[0] = -100
    return d.real(rows, count), target, d.positive(count).detach() if d.some() else None


@sample(aten.cross_entropy_loss.default)
def cross_entropy_loss(d: Draw, target: Any) -> Sample:
    logits, labels, weight = classes(d)
    return Sample(target, (logits, labels, weight, d.pick(0, 1, 2), -100, d.pick(0.0, 0.1)))


@sample(aten.cross_entropy_loss.default)
def probabilities(d: Draw, target: Any) -> Sample:
    rows = [] if d.some(4) else [d.size()]
    return Sample(target, (d.real(*rows, 4), d.real(*rows, 4, grad=d.some()), None, d.pick(0, 1, 2)))


@sample(aten.cross_entropy_loss.default)
def pixels(d: Draw, target: Any) -> Sample:
    rows = d.size()
    return Sample(target, (d.real(rows, d.even(), 3), d.ints(d.ranks, rows, 3), None, d.pick(0, 1, 2)))


@sample(ops.cross_entropy)
def cross_entropy(d: Draw, target: Any) -> Sample:
    logits, labels, weight = classes(d)
    axes = d.pick({}, {"vocab_axis": "ax"}, {"batch_axes": ("ax",)})
    reduction = d.pick("mean", "sum") if "batch_axes" in axes else d.pick("mean", "sum", "none")
    return Sample(target, (logits, labels, weight, reduction, -100, d.pick(0.0, 0.1)), axes)


@sample(aten.index_select.default)
def index_select(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    return Sample(target, (d.real(*shape), dim, d.ints(shape[dim], d.size())))


def _inside(d: Draw, shape: list[int], dim: int) -> list[int]:
    """The shape of an index into ``shape``."""
    sizes = [size if d.some() else max(size - 1, 1) for size in shape]
    sizes[dim] = d.size()
    return sizes


@sample(aten.gather.default)
def gather(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    return Sample(target, (d.real(*shape), dim, d.ints(shape[dim], *_inside(d, shape, dim))))


@sample(aten.scatter.src, aten.scatter.value, aten.scatter_add.default, aten.scatter.reduce, aten.scatter_reduce.two)
def scatter(d: Draw, target: Any) -> Sample:
    """Into distinct places, so that the order of writes is no matter."""
    shape = d.shape()
    dim = d.dim(len(shape))
    inside = _inside(d, shape, dim)
    inside[dim] = min(inside[dim], shape[dim])
    index = torch.stack([torch.randperm(shape[dim], generator=torch.Generator().manual_seed(i)) for i in range(16)])[d.pick(0, 1, 2)]
    places = index[: inside[dim]].reshape([-1 if i == dim % len(shape) else 1 for i in range(len(shape))]).expand(inside).contiguous()
    source: Any = 0.5 if target is aten.scatter.value else d.real(*inside, grad=target is not aten.scatter.reduce)
    x = d.real(*shape, grad=target is not aten.scatter.reduce)
    if target is aten.scatter.reduce:
        return Sample(target, (x, dim, places, source), {"reduce": "add"})
    return Sample(target, (x, dim, places, source, *(("sum",) if target is aten.scatter_reduce.two else ())))


@sample(aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar)
def index_add(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    index = torch.arange(max(shape[dim] - 1, 1))
    source: Any = 0.5
    if target is not aten.index_fill.int_Scalar:
        sizes = list(shape)
        sizes[dim] = len(index)
        source = d.real(*sizes)
    return Sample(target, (d.real(*shape), dim, index, source))


@sample(aten.index.Tensor)
def index(d: Draw, target: Any) -> Sample:
    shape = [d.size() for _ in range(3)]
    addressed = d.pick([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2])
    common = d.shape(1, 2)
    indices: list[Tensor | None] = [None, None, None]
    for dim in addressed:
        own = [1 if d.some(3) else size for size in common[d.pick(*range(len(common))) :]]
        indices[dim] = d.ints(shape[dim], *own)
    return Sample(target, (d.real(*shape), indices[: d.pick(addressed[-1] + 1, 3)]))


@sample(aten.index.Tensor)
def mask(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), [d.flags(shape[0])]))


@sample(aten.one_hot.default)
def one_hot(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.ints(5, *d.shape(0)), 5))


@sample(aten.bucketize.Tensor)
def bucketize(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0), grad=False), torch.tensor([-0.5, 0.1, 0.4], dtype=torch.float64)))


@sample(moe_dispatch_op)
def moe_dispatch(d: Draw, target: Any) -> Sample:
    tokens, experts = d.size(), 4
    chosen = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(i))[:2] for i in range(tokens)])
    return Sample(target, (d.real(tokens, d.size()), chosen, experts))


@sample(moe_combine_op)
def moe_combine(d: Draw, target: Any) -> Sample:
    tokens, choices = d.size(), 2
    order = torch.randperm(tokens * choices, generator=torch.Generator().manual_seed(tokens))
    return Sample(target, (d.real(tokens * choices, d.size()), order, d.real(tokens, choices)))

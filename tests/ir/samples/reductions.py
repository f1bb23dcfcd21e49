"""Reductions, normalisations and losses."""

from __future__ import annotations

from typing import Any

import torch

from hgc.ir import ops
from tests.ir.rule_harness import Sample
from tests.ir.samples.registry import Draw, sample

aten = torch.ops.aten


@sample(aten.sum.default, aten.mean.default)
def complete(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)),))


@sample(aten.sum.default)
def count(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.flags(*d.shape(0)),))


def dims_of(d: Draw, rank: int) -> list[int]:
    chosen = [dim for dim in range(rank) if d.some()] or [rank - 1]
    return [d.pick(dim, dim - rank) for dim in chosen]


@sample(aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default, aten.var.dim, aten.std.dim)
def over_dims(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    if target in (aten.var.dim, aten.std.dim):
        shape = [max(size, 2) for size in shape]
        return Sample(target, (d.real(*shape), dims_of(d, len(shape)), True, d.some()))
    return Sample(target, (d.real(*shape), dims_of(d, len(shape)), d.some()))


@sample(aten.var.correction, aten.std.correction, aten.var_mean.correction)
def moments(d: Draw, target: Any) -> Sample:
    shape = [max(size, 2) for size in d.shape()]
    return Sample(target, (d.real(*shape), d.pick(None, dims_of(d, len(shape)))), {"correction": d.pick(0, 1), "keepdim": d.some()})


@sample(aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim)
def norm(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), 2, dims_of(d, len(shape)), d.some()))


@sample(aten.max.dim, aten.min.dim, aten.argmax.default, aten.argmin.default, aten.prod.dim_int)
def over_dim(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape)), d.some()))


@sample(aten.argmax.default, aten.argmin.default)
def flat_position(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape()),))


@sample(aten.all.dim, aten.any.dim)
def truth(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.flags(*shape), d.dim(len(shape)), d.some()))


@sample(ops.mean)
def mean_over_axes(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.pick(None, dims_of(d, len(shape))), d.some()), {"batch_axes": ("ax",) if d.some() else ()})


@sample(aten.softmax.int, aten.log_softmax.int, aten.sort.default, aten.argsort.default, aten.cumprod.default)
@sample(aten.logcumsumexp.default, aten.cummax.default, aten.cummin.default, aten.cumsum.default)
def within_dim(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape))))


@sample(aten._softmax.default, aten._log_softmax.default)
def softmax(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape), d.dim(len(shape)), False))


@sample(aten.sort.stable, aten.argsort.stable)
def stable_sort(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    return Sample(target, (d.real(*shape),), {"stable": True, "dim": d.dim(len(shape))})


@sample(aten.topk.default)
def topk(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    return Sample(target, (d.real(*shape), d.pick(*range(1, shape[dim] + 1)), dim))


@sample(aten.glu.default)
def glu(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    dim = d.dim(len(shape))
    shape[dim] = 2 * d.ranks
    return Sample(target, (d.real(*shape), dim))


@sample(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(d: Draw, target: Any) -> Sample:
    own = [d.pick(2, d.ranks) for _ in range(d.pick(1, 2))]
    weight = d.real(*own) if d.some() else None
    bias = (d.real(*own) if d.some() else None,) if target is aten.layer_norm.default else ()
    return Sample(target, (d.real(*d.shape(0, 2), *own), own, weight, *bias))


@sample(aten.group_norm.default)
def group_norm(d: Draw, target: Any) -> Sample:
    groups = d.pick(1, d.ranks)
    channels = 2 * groups
    affine = (d.real(channels), d.real(channels)) if d.some() else ()
    return Sample(target, (d.real(d.size(), channels, 3), groups, *affine))


@sample(aten.batch_norm.default, ops.batch_norm)
def batch_norm(d: Draw, target: Any) -> Sample:
    """Running statistics are compared too: every rank must update its own alike."""
    channels = d.pick(d.ranks, 2 * d.ranks, 1)
    x = d.real(d.pick(d.ranks, 2 * d.ranks, 5), channels, *d.shape(0, 2))
    weight, bias = (d.real(channels), d.real(channels)) if d.some() else (None, None)
    training = d.some()
    running = (d.real(channels, grad=False), d.positive(channels).detach()) if not training or d.some() else (None, None)
    if x.numel() == channels:
        training, running = False, (d.real(channels, grad=False), d.positive(channels).detach())
    extra = (False,) if target is aten.batch_norm.default else ()
    return Sample(target, (x, weight, bias, *running, training, 0.1, 1e-5, *extra))


@sample(aten.mse_loss.default, aten.l1_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default)
@sample(aten.soft_margin_loss.default, aten.binary_cross_entropy_with_logits.default)
def elementwise_loss(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    two_sided = target in (aten.mse_loss.default, aten.l1_loss.default) and d.some()
    return Sample(target, (d.real(*shape), d.real(*shape, grad=two_sided)), {"reduction": d.pick(0, 1, 2)})


@sample(aten.binary_cross_entropy.default, aten.kl_div.default)
def probability_loss(d: Draw, target: Any) -> Sample:
    shape = d.shape()
    x, y = d.positive(*shape).detach() / 1.2, d.positive(*shape).detach() / 1.2
    return Sample(target, (x.requires_grad_(), y), {"reduction": d.pick(0, 1, 2)})


@sample(aten.binary_cross_entropy_with_logits.default)
def weighted_loss(d: Draw, target: Any) -> Sample:
    rows, classes = d.size(), d.size()
    x, y = d.real(rows, classes), d.positive(rows, classes).detach()
    return Sample(target, (x, y, d.real(rows, 1, grad=False), d.real(classes, grad=False)), {"reduction": d.pick(0, 2)})


@sample(aten.nll_loss.default, aten.nll_loss_nd.default)
def nll_loss(d: Draw, target: Any) -> Sample:
    rows = [] if d.some(4) else [d.size()]
    return Sample(target, (d.real(*rows, 5), d.ints(5, *rows)), {"reduction": d.pick(0, 1, 2)})


@sample(aten.nll_loss2d.default)
def nll_loss2d(d: Draw, target: Any) -> Sample:
    rows = d.size()
    return Sample(target, (d.real(rows, 5, 2, 3), d.ints(5, rows, 2, 3)), {"reduction": d.pick(0, 1, 2)})

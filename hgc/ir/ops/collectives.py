"""Collectives as forward/backward pairs: each names what happens to the value and what happens to its gradient.

torch's functional collectives move the data, below autograd: their own gradient formulas have another meaning (the gradient of
``all_reduce`` is summed again, which is the ``all_reduce_r`` of this file and four times too large for an invariant loss on four ranks).
``dim`` counts from the front. A tensor that needs no gradient takes the same path without autograd.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hgc import _torch_compat as raw
from hgc.ir.ops import groups
from hgc.ir.ops.layout import Order, Parts, Zigzag, join, rank_major, take

# -- on the data, without gradients ---------------------------------------------------------------------------------------------------


def sum_over(x: Tensor, name: str) -> Tensor:
    return raw.all_reduce(x, "sum", name)


def stack_over(x: Tensor, size: int, name: str) -> Tensor:
    """``[*shape]`` on each rank to ``[size, *shape]`` on all."""
    return raw.all_gather_flat(x.reshape(1, *x.shape), size, name)


def _gather(x: Tensor, dim: int, size: int, name: str, parts: Order = 1) -> Tensor:
    return join(stack_over(x, size, name), dim, parts)


def _reduce_scatter(x: Tensor, dim: int, size: int, name: str, parts: Order = 1) -> Tensor:
    return raw.reduce_scatter_flat(rank_major(x, dim, size, parts), size, name).squeeze(0)


def _exchange(x: Tensor, src: int, dst: int, size: int, name: str) -> Tensor:
    return join(raw.all_to_all_flat(rank_major(x, dst, size), size, name), src)


# -- with gradients -------------------------------------------------------------------------------------------------------------------


class _CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return sum_over(grad, ctx.name), None


class _AsInvariant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad if ctx.rank == 0 else torch.zeros_like(grad), None


class _AsPartial(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        return x.view_as(x) if rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        if x.dim() == 0 and not torch.compiler.is_compiling():
            # a loss, which backward does not read: no rank need wait here for the slowest
            return raw.finished_when_read(raw.start_all_reduce(x, "sum", name))
        return sum_over(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _AllReduceR(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return sum_over(x, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return sum_over(grad, ctx.name), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str, parts: Order) -> Tensor:
        ctx.where = (dim, size, name, parts)
        return _gather(x, dim, size, name, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _reduce_scatter(grad, *ctx.where), None, None, None, None


class _AllGatherI(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str, rank: int, parts: Order) -> Tensor:
        ctx.where = (dim, rank, size, parts)
        return _gather(x, dim, size, name, parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take(grad, *ctx.where).contiguous(), None, None, None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str) -> Tensor:
        ctx.where = (dim, size, name)
        return _reduce_scatter(x, dim, size, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, *ctx.where), None, None, None


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, size: int, name: str, rank: int, parts: Order) -> Tensor:
        ctx.where = (dim, size, name, parts)
        return take(x, dim, rank, size, parts).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _gather(grad, *ctx.where), None, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, src: int, dst: int, size: int, name: str) -> Tensor:
        ctx.where = (dst, src, size, name)
        return _exchange(x, src, dst, size, name)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _exchange(grad, *ctx.where), None, None, None, None


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


# -- the operators --------------------------------------------------------------------------------------------------------------------


def copy_in(x: Tensor, axis: str) -> Tensor:
    """I -> R: the value itself; its gradient, partial on each rank, is summed over ``axis``."""
    group = groups.find(axis)
    return _apply(_CopyIn, x, group.name) if group and x.requires_grad else x


def as_invariant(x: Tensor, axis: str) -> Tensor:
    """R -> I: the value itself; its gradient, equal on all ranks, counts on the first rank of ``axis`` only."""
    group = groups.find(axis)
    return _apply(_AsInvariant, x, group.rank) if group and x.requires_grad else x


def as_partial(x: Tensor, axis: str) -> Tensor:
    """I -> P: the axis' first rank keeps the value, the others hold zeros; the gradient, alike on all ranks, passes (no communication)."""
    group = groups.find(axis)
    return x if group is None else _apply(_AsPartial, x, group.rank)


def all_reduce(x: Tensor, axis: str) -> Tensor:
    """P -> I: the sum over ``axis``; the gradient passes as it is. A 0-d result waits for the other ranks when it is first read."""
    group = groups.find(axis)
    if group is None:
        return x
    return _apply(_AllReduce, x, group.name) if x.requires_grad else sum_over(x, group.name)


def all_reduce_r(x: Tensor, axis: str) -> Tensor:
    """P -> R: the sum over ``axis``, in forward and in backward."""
    group = groups.find(axis)
    if group is None:
        return x
    return _apply(_AllReduceR, x, group.name) if x.requires_grad else sum_over(x, group.name)


def _order(parts: Parts, zigzag: bool) -> Order:
    """``zigzag``: ``parts`` counts the sequences along the dim, each of which is split in zigzag order."""
    if not zigzag:
        return parts
    assert not isinstance(parts, tuple), "a zigzag order has runs of one length"
    return Zigzag(parts)


def all_gather(x: Tensor, dim: int, axis: str, parts: Parts = 1, zigzag: bool = False) -> Tensor:
    """S -> R: the whole tensor; its gradient, partial on each rank, is summed and scattered. ``parts``: global part sizes of ``dim``."""
    group = groups.find(axis)
    if group is None:
        return x
    if not x.requires_grad:
        return _gather(x, dim, group.size, group.name, _order(parts, zigzag))
    return _apply(_AllGather, x, dim, group.size, group.name, _order(parts, zigzag))


def all_gather_i(x: Tensor, dim: int, axis: str, parts: Parts = 1, zigzag: bool = False) -> Tensor:
    """S -> I: the whole tensor; of its gradient, equal on all ranks, each rank keeps its slice."""
    group = groups.find(axis)
    if group is None:
        return x
    if not x.requires_grad:
        return _gather(x, dim, group.size, group.name, _order(parts, zigzag))
    return _apply(_AllGatherI, x, dim, group.size, group.name, group.rank, _order(parts, zigzag))


def reduce_scatter(x: Tensor, dim: int, axis: str) -> Tensor:
    """P -> S: the rank's slice of the sum; the gradient is gathered."""
    group = groups.find(axis)
    if group is None:
        return x
    if not x.requires_grad:
        return _reduce_scatter(x, dim, group.size, group.name)
    return _apply(_ReduceScatter, x, dim, group.size, group.name)


def shard(x: Tensor, dim: int, axis: str, parts: Parts = 1, zigzag: bool = False) -> Tensor:
    """I -> S: the rank's slice; the gradient is gathered. Raises ``ShardingError`` if ``dim`` does not divide."""
    group = groups.find(axis)
    if group is None:
        return x
    if not x.requires_grad:
        return take(x, dim, group.rank, group.size, _order(parts, zigzag))
    return _apply(_Shard, x, dim, group.size, group.name, group.rank, _order(parts, zigzag))


def shard_r(x: Tensor, dim: int, axis: str, parts: Parts = 1, zigzag: bool = False) -> Tensor:
    """R -> S: the rank's slice; the gradient is padded with zeros, without communication."""
    group = groups.find(axis)
    return take(x, dim, group.rank, group.size, _order(parts, zigzag)) if group else x


def all_to_all(x: Tensor, src: int, dst: int, axis: str) -> Tensor:
    """S(src) -> S(dst): dim ``src`` becomes whole, dim ``dst`` is split; the gradient takes the way back."""
    group = groups.find(axis)
    if group is None:
        return x
    if not x.requires_grad:
        return _exchange(x, src, dst, group.size, group.name)
    return _apply(_AllToAll, x, src, dst, group.size, group.name)

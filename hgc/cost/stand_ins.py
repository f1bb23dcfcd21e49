"""Operators as they run on a GPU, for measuring on fake CPU tensors: same results' shapes, same saved tensors, same products.

On the CPU attention and dropout keep other tensors for backward than the kernels that training uses, and the experts' grouped products
depend on numbers. Each stand-in calls products of the right sizes, so that whoever watches counts the right FLOPs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from hgc._torch_compat import start_shift
from hgc.cost.kernels import fused_attention, grouped_products
from hgc.ir import ops
from hgc.ir.ops.attention import _allowed, _masked
from hgc.ir.ops.attention import attention as real_attention
from hgc.ir.ops.exchange import exchanged
from hgc.ir.ops.moe import _ToRows


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """In what kernels keep the logarithms of softmax sums."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _FusedAttention(torch.autograd.Function):
    """Keeps q, k, v, the bias, the result and one number for each row of scores."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, window: int) -> Tensor:
        b, h, s, d = q.shape
        t, e = v.shape[2:]
        ctx.mask = causal, window
        with fused_attention(q, t, causal, window, backward=False):
            torch.bmm(q.new_empty(b * h, s, d), q.new_empty(b * h, d, t))
            torch.bmm(q.new_empty(b * h, s, t), q.new_empty(b * h, t, e))
        like_q = bias is None and d == e  # the kernel without masks returns its result in the memory order of q
        out = (torch.empty_like(q.transpose(1, 2)) if like_q else q.new_empty(b, s, h, e)).transpose(1, 2)
        sums = q.new_empty(b, h, s, dtype=statistics_dtype(q.dtype))
        ctx.save_for_backward(q, k, v, bias, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, bias, _, _ = ctx.saved_tensors
        b, h, s, d = q.shape
        t, e = v.shape[2:]
        need_q, need_k, need_v, need_bias = ctx.needs_input_grad[:4]
        causal, window = ctx.mask
        with fused_attention(q, t, causal, window, backward=True):
            scores = q.new_empty(b * h, s, t)
            if need_v:
                torch.bmm(scores.transpose(1, 2), q.new_empty(b * h, s, e))
            if need_q or need_k or need_bias:
                torch.bmm(q.new_empty(b * h, s, e), q.new_empty(b * h, e, t))
            if need_q:
                torch.bmm(scores, q.new_empty(b * h, t, d))
            if need_k:
                torch.bmm(scores.transpose(1, 2), q.new_empty(b * h, s, d))
        needs = zip((q, k, v, bias), ctx.needs_input_grad[:4], strict=True)
        return (*(torch.empty_like(x) if x is not None and needed else None for x, needed in needs), None, None)


class _RingAttention(torch.autograd.Function):
    """A rank's queries with the keys of all ranks, as one kernel; keys and values go round, in backward with their gradients in float32.

    In zigzag order each rank has the same share of what a causal mask leaves.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        sinks: Tensor | None,
        causal: bool,
        window: int,
        zigzag: bool,
        ring: ops.groups.Group,
    ) -> Tensor:
        ctx.ring, ctx.mask = ring, (causal, window, zigzag)
        b, h, s, _ = q.shape
        _ring_kernel(q, k, v, ring.size, ctx.mask, backward=False)
        for _ in range(ring.size - 1):
            start_shift(torch.cat([k.reshape(-1), v.reshape(-1)]), 0, ring.size, ring.name)
        out = q.new_empty(b, h, s, v.shape[3])
        ctx.save_for_backward(q, k, v, bias, sinks, out, q.new_empty(b, h, s, dtype=statistics_dtype(q.dtype)))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, bias, sinks, _, sums = ctx.saved_tensors
        _ring_kernel(q, k, v, ctx.ring.size, ctx.mask, backward=True)
        held = torch.cat([k.reshape(-1), v.reshape(-1)])
        for _ in range(ctx.ring.size - 1):
            start_shift(held, 0, ctx.ring.size, ctx.ring.name)
        for _ in range(ctx.ring.size):
            start_shift(torch.empty_like(held, dtype=sums.dtype), 0, ctx.ring.size, ctx.ring.name)
        needs = zip((q, k, v, bias, sinks), ctx.needs_input_grad[:5], strict=True)
        return (*(torch.empty_like(x) if x is not None and needed else None for x, needed in needs), *(None,) * 4)


def _ring_kernel(q: Tensor, k: Tensor, v: Tensor, ranks: int, mask: tuple[bool, int, bool], backward: bool) -> None:
    """The products of all tiles; of a causal mask alone half of the pairs are left."""
    b, h, s, d = q.shape
    keys, e = k.shape[2] * ranks, v.shape[3]
    causal, window, zigzag = mask
    halved = causal and zigzag and not window
    with fused_attention(q, keys // 2 if halved else keys, causal and not halved, window, backward):
        for inner in (d, e, *((e, d, d) if backward else ())):
            torch.bmm(q.new_empty(b * h, s, inner), q.new_empty(b * h, inner, keys))


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    causal: bool = False,
    window: int = 0,
    scale: float | None = None,
    softcap: float = 0.0,
    dropout: float = 0.0,
    random_axes: tuple[str, ...] = (),
    exchange_axis: str | None = None,
    ring_axis: str | None = None,
    zigzag: bool = False,
    where: object = None,
) -> Tensor:
    """:func:`hgc.ir.ops.attention`; with soft caps or sinks it is written out on every device."""
    ring = ops.groups.find(ring_axis)

    def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
        if ring is not None:
            q, k, v = (_lowered(x) for x in (q, k, v))
            return _apply(_RingAttention, q, k, v, bias, sinks, causal, window, zigzag, ring)
        if sinks is not None or softcap:
            return real_attention(q, k, v, bias, sinks, causal, window, scale, softcap, dropout)
        narrow = 0 if window and window >= k.shape[2] else window
        if narrow or (causal and bias is not None):
            bias = _masked(bias, _allowed(q, k, causal, narrow))
        q, k, v = (_lowered(x) for x in (q, k, v))
        if bias is not None and bias.dtype == torch.bool:
            bias = bias.to(q.dtype)  # kernels add their masks
        return _apply(_FusedAttention, q, k, v, bias, causal, narrow)

    return exchanged(core, q, k, v, bias, sinks, exchange_axis)


def _lowered(x: Tensor) -> Tensor:
    """As autocast gives operands to the kernel."""
    return x.to(torch.get_autocast_dtype(x.device.type)) if torch.is_autocast_enabled(x.device.type) else x


def dropout(x: Tensor, p: float, random_axes: tuple[str, ...] = (), where: object = None) -> Tensor:
    """:func:`hgc.ir.ops.dropout` with a mask of one byte an element."""
    kept: Tensor = torch.native_dropout(x, p, True)[0] if p else x
    return kept


def moe_dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`hgc.ir.ops.moe_dispatch` without counting tokens."""
    order = torch.argsort(experts.reshape(-1), stable=True)
    return _apply(_ToRows, x, order, experts.shape[1]), experts.new_empty(num_experts, dtype=torch.int32), order


class _GroupedLinear(torch.autograd.Function):
    """One kernel for all experts: keeps rows, weights and offsets."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(rows, weight, offsets)
        ctx.transposed = transposed
        one = weight[0] if transposed else weight[0].t()
        sizes = rows.shape[0], one.shape[1], one.shape[0]
        with grouped_products(weight.shape[0], [sizes], sizes[0], rows.dtype):
            return torch.mm(rows, one)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        rows, weight, _ = ctx.saved_tensors
        one = weight[0].t() if ctx.transposed else weight[0]
        count, (wide, narrow) = rows.shape[0], one.shape
        needs = ctx.needs_input_grad[:2]
        products = [sizes for sizes, needed in zip(((count, narrow, wide), (wide, narrow, count)), needs, strict=True) if needed]
        with grouped_products(weight.shape[0], products, count, rows.dtype):
            for_rows = torch.mm(grads[0], one) if needs[0] else None
            if needs[1]:
                torch.mm(grads[0].t(), rows)
        return for_rows, torch.empty_like(weight) if needs[1] else None, None, None


def grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """:func:`hgc.ir.ops.grouped_linear` without knowing where the groups end."""
    return _apply(_GroupedLinear, rows, weight, offsets, transposed)


def _apply(function: type[torch.autograd.Function], *args: Any) -> Tensor:
    result: Tensor = function.apply(*args)  # type: ignore[no-untyped-call]
    return result


STAND_INS: Mapping[Any, Callable[..., Any]] = {
    ops.attention: attention,
    ops.dropout: dropout,
    ops.moe_dispatch: moe_dispatch,
    ops.grouped_linear: grouped_linear,
}

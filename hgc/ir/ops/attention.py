"""Scaled dot-product attention with everything that models put into it, as one operator."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from hgc.ir.ops import groups, keyed
from hgc.ir.ops.exchange import exchanged
from hgc.ir.ops.random import next_seed
from hgc.ir.ops.random import random_axes as random_numbers
from hgc.ir.ops.ring import Masking, ring_attention


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
    where: tuple[keyed.Cut, ...] | None = None,
) -> Tensor:
    """``softmax(cap(q @ k.T * scale) + bias, masked) @ v``.

    Args:
        q: [B, H, S, D]
        k: [B, G, T, D]; G divides H, query head h reads key head ``h // (H // G)``
        v: [B, G, T, E]
        bias: broadcastable to [B, H, S, T]; boolean (True = attend) or added to the scores
        sinks: [H], one more score for each row that takes part in the softmax and has no value
        causal: row i attends to columns ``j <= i`` (rows and columns aligned at zero)
        window: with ``window > 0`` row i attends to columns ``j > i - window`` only
        scale: factor of the scores, by default ``D ** -0.5``
        softcap: with ``softcap > 0`` the scores are ``softcap * tanh(scores / softcap)``
        dropout: probability of dropping an attention weight; 0 outside training
        random_axes: mesh axes along which the dropped weights differ
        exchange_axis: mesh axis whose ranks hold shares of S and T, and trade them for shares of the heads (Ulysses)
        ring_axis: mesh axis whose ranks hold shares of S and T, and pass keys and values round; major to ``exchange_axis``
        zigzag: along ``ring_axis`` the shares are in zigzag order (:class:`hgc.ir.ops.layout.Zigzag`)

        where: how ``q`` is cut; then the dropped weights are those of one device (:mod:`hgc.ir.ops.keyed`)

    With these axes ``bias`` has the rank's rows on ``ring_axis`` and is whole otherwise, and ``sinks`` is whole.

    Returns [B, H, S, E] in ``q``'s dtype; the memory order is the kernel's.
    """
    scale = q.shape[3] ** -0.5 if scale is None else scale
    ring = groups.find(ring_axis)

    def core(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None) -> Tensor:
        if ring is not None or (dropout and where is not None):
            seed = next_seed(random_axes if where is None else ()) if dropout else 0
            places = _places(q, where, exchange_axis) if dropout and where is not None else None
            masking = Masking(causal, window, scale, softcap, dropout, seed, zigzag and ring is not None, places)
            return ring_attention(q, k, v, bias, sinks, masking, ring or groups.ALONE)
        with _random(dropout, random_axes):
            if sinks is None and not softcap:
                return _fused(q, k, v, bias, causal, window, scale, dropout)
            return _exact(q, k, v, bias, sinks, causal, window, scale, softcap, dropout)

    return exchanged(core, q, k, v, bias, sinks, exchange_axis)


def _places(q: Tensor, where: tuple[keyed.Cut, ...], exchange_axis: str | None) -> tuple[tuple[Tensor, int], ...]:
    """Global batch rows, heads and positions of a rank's queries, as they are while it attends."""
    exchanged_cuts = [cut for cut in where if cut[0] != exchange_axis]
    if exchange_axis is not None:
        exchanged_cuts.append((exchange_axis, 1, 1, False))
    return tuple(keyed.indices(q.size(dim), dim, exchanged_cuts, q.device) for dim in range(3))


def _random(dropout: float, axes: tuple[str, ...]) -> AbstractContextManager[None]:
    return random_numbers(axes) if dropout and axes else nullcontext()


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, window: int, scale: float, dropout: float) -> Tensor:
    """torch's kernel, which knows either a mask or ``is_causal``, not both."""
    if window and window >= k.shape[2]:
        window = 0
    if window or (causal and bias is not None):
        bias, causal = _masked(bias, _allowed(q, k, causal, window)), False
    return F.scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1])


def _allowed(q: Tensor, k: Tensor, causal: bool, window: int) -> Tensor:
    """The [S, T] boolean mask of ``causal`` and ``window``."""
    rows = torch.arange(q.shape[2], device=q.device)[:, None]
    columns = torch.arange(k.shape[2], device=q.device)[None, :]
    allowed = columns <= rows if causal else torch.ones_like(columns <= rows)
    return allowed & (columns > rows - window) if window else allowed


def _masked(bias: Tensor | None, allowed: Tensor) -> Tensor:
    if bias is None:
        return allowed
    return bias & allowed if bias.dtype == torch.bool else bias.masked_fill(~allowed, float("-inf"))


def _exact(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    window: int,
    scale: float,
    softcap: float,
    dropout: float,
) -> Tensor:
    """Written out, for what no kernel of torch knows: soft caps and sinks. The softmax is at least float32."""
    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.matmul(q, k.transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    if causal or window:
        bias = _masked(bias, _allowed(q, k, causal, window))
    if bias is not None:
        scores = scores.masked_fill(~bias, float("-inf")) if bias.dtype == torch.bool else scores + bias
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)], -1)
    precise = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores, -1, dtype=precise).to(q.dtype)
    if sinks is not None:
        weights = weights[..., :-1]
    return torch.matmul(F.dropout(weights, dropout) if dropout else weights, v)

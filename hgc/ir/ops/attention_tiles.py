"""Attention of some rows to some columns, as one summand of a softmax over more columns: forward, backward, and how summands merge.

torch's flash kernel where it can be had; written out, in at least float32, for biases, soft caps, windows and dropout. Names: B batch,
H heads, S rows, T columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hgc import _torch_compat as raw


@dataclass(frozen=True)
class Tile:
    """One block of scores: the tensors of its rows and columns, and what is done to its scores.

    Args:
        q: [B, H, S, D]
        k, v: [B, H, T, D or E]
        bias: broadcastable to [B, H, S, T]; boolean (True = attend) or added
        causal: rows and columns are the same positions, and a row attends to those up to its own
        allowed: [S, T] boolean, or None where ``causal`` says it all
        kept: [B, H, S, T], the factors of dropout, or None
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float = 0.0
    bias: Tensor | None = None
    causal: bool = False
    allowed: Tensor | None = None
    kept: Tensor | None = None

    @property
    def is_fused(self) -> bool:
        """Does the flash kernel know all of it?"""
        plain = self.bias is None and self.allowed is None and self.kept is None and not self.softcap
        return plain and raw.has_fused_attention(self.q, self.v)


@dataclass(frozen=True)
class TileGradients:
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None


def precise(dtype: torch.dtype) -> torch.dtype:
    """In what scores, their sums and gradients of keys are kept."""
    return torch.promote_types(dtype, torch.float32)


def forward(tile: Tile) -> tuple[Tensor, Tensor]:
    """Result [B, H, S, E] and logarithm of the softmax sum [B, H, S]; zero and minus infinity for rows without a column."""
    if tile.is_fused:
        out, sums = raw.fused_attention(tile.q, tile.k, tile.v, tile.causal, tile.scale)
        return out.to(sums.dtype), sums
    scores, _ = _scores(tile)
    sums = torch.logsumexp(scores, -1)
    weights = _weights(scores, sums)
    return torch.matmul(_dropped(weights, tile.kept), tile.v.to(sums.dtype)), sums


def merge(out: Tensor, sums: Tensor, more: Tensor, more_sums: Tensor) -> tuple[Tensor, Tensor]:
    """Two summands of one softmax: their common result and the logarithm of their common sum."""
    total = torch.logaddexp(sums, more_sums)
    return out * _share(sums, total) + more * _share(more_sums, total), total


def backward(tile: Tile, grad: Tensor, out: Tensor, sums: Tensor, needs_bias: bool) -> TileGradients:
    """Gradients from the whole softmax's result ``out`` [B, H, S, E] and its ``sums`` [B, H, S]; ``grad`` is that of ``out``."""
    if tile.is_fused:
        grads = raw.fused_attention_backward(grad, tile.q, tile.k, tile.v, out, sums, tile.causal, tile.scale)
        return TileGradients(*grads, None)
    scores, slope = _scores(tile)
    weights = _weights(scores, sums)
    wide = grad.to(weights.dtype)
    delta = (wide * out).sum(-1, keepdim=True)
    grad_v = torch.matmul(_dropped(weights, tile.kept).transpose(2, 3), wide)
    grad_weights = _dropped(torch.matmul(wide, tile.v.to(wide.dtype).transpose(2, 3)), tile.kept)
    grad_scores = weights * (grad_weights - delta)
    grad_bias = _sum_to(grad_scores, tile.bias) if needs_bias and tile.bias is not None else None
    inner = grad_scores * tile.scale if slope is None else grad_scores * slope * tile.scale
    grad_q = torch.matmul(inner, tile.k.to(inner.dtype))
    grad_k = torch.matmul(inner.transpose(2, 3), tile.q.to(inner.dtype))
    return TileGradients(grad_q, grad_k, grad_v, grad_bias)


def _scores(tile: Tile) -> tuple[Tensor, Tensor | None]:
    """Masked scores [B, H, S, T], and the slope of the soft cap."""
    dtype = precise(tile.q.dtype)
    scores = torch.matmul(tile.q.to(dtype), tile.k.to(dtype).transpose(2, 3)) * tile.scale
    slope = None
    if tile.softcap:
        capped = torch.tanh(scores / tile.softcap)
        scores, slope = capped * tile.softcap, 1 - capped**2
    if tile.bias is not None:
        scores = scores.masked_fill(~tile.bias, -torch.inf) if tile.bias.dtype == torch.bool else scores + tile.bias
    allowed = tile.allowed
    if tile.causal:
        allowed = torch.ones(scores.shape[2:], dtype=torch.bool, device=scores.device).tril()
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)
    return scores, slope


def _weights(scores: Tensor, sums: Tensor) -> Tensor:
    """``exp(scores - sums)``, zero for rows without a column."""
    return torch.exp(scores - sums.masked_fill(sums == -torch.inf, 0.0).unsqueeze(-1))


def _share(sums: Tensor, total: Tensor) -> Tensor:
    return torch.exp(sums - total.masked_fill(total == -torch.inf, 0.0)).unsqueeze(-1)


def _dropped(weights: Tensor, kept: Tensor | None) -> Tensor:
    return weights if kept is None else weights * kept


def _sum_to(x: Tensor, like: Tensor) -> Tensor:
    """Sum over the dims along which ``like`` was broadcast."""
    return x.sum_to_size(like.shape)

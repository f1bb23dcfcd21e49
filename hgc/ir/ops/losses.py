"""Vocabulary-parallel embedding and cross entropy with the meaning they have on one device."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgc.errors import ShardingError
from hgc.ir.ops import groups
from hgc.ir.ops.collectives import max_over, sum_over


def vocab_embedding(weight: Tensor, ids: Tensor, axis: str, padding_idx: int = -1) -> Tensor:
    """Partial embedding: zero where a row of ``ids`` lives on another rank of ``axis``.

    ``weight`` is the rank's ``[V / ranks, D]`` rows, ``ids`` any shape of global indices; returns ``[*ids.shape, D]``. ``padding_idx`` is a
    global index whose row gets no gradient, -1 for none.
    """
    group = groups.find(axis)
    if group is None:
        return F.embedding(ids, weight, padding_idx if padding_idx >= 0 else None)
    rows = weight.size(0)
    local = ids - group.rank * rows
    elsewhere = (local < 0) | (local >= rows)
    pad = padding_idx - group.rank * rows
    found = F.embedding(local.masked_fill(elsewhere, 0), weight, pad if padding_idx >= 0 and 0 <= pad < rows else None)
    return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)


class _VocabRows(torch.autograd.Function):
    """Loss of each row, ``[N]``, from this rank's columns of the logits; two small all-reduces, no gathered logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        classes: int,
        name: str,
        rank: int,
    ) -> Tensor:
        first = rank * logits.size(1)
        valid = min(max(classes - first, 0), logits.size(1))  # columns past the vocabulary are padding
        z = logits.narrow(1, 0, valid)
        top = z.detach().amax(1) if valid else z.new_full((z.size(0),), -torch.inf)
        z = (z - max_over(top, name).unsqueeze(1)).to(_accumulate_dtype(logits.dtype))
        kept = target != ignore_index
        local = target - first
        here = kept & (local >= 0) & (local < valid)
        local = local.masked_fill(~here, 0)
        w = None if weight is None else weight.to(z.dtype)
        columns = None if w is None else w.narrow(0, first, valid) if valid else w[:0]
        at_target = z.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0) if valid else z.new_zeros(z.size(0))
        all_classes = z.sum(1) if columns is None else (z * columns).sum(1)
        e = z.exp_()
        total, at_target, all_classes = sum_over(torch.stack([e.sum(1), at_target, all_classes]), name).unbind(0)
        # loss = a (log total - z_t) + b (W log total - sum_c w_c z_c), rows that are ignored have a = b = 0
        mass = classes if w is None else w[:classes].sum()
        a = (1.0 - smoothing) * (kept.to(z.dtype) if w is None else w[target.masked_fill(~kept, 0)] * kept)
        b = kept.to(z.dtype) * (smoothing / classes)
        log_total = total.log()
        loss = a * (log_total - at_target) + b * (mass * log_total - all_classes)
        ctx.save_for_backward(e.div_(total.unsqueeze(1)), local, here, kept, a, b, a + b * mass, columns)
        ctx.smooth, ctx.columns, ctx.dtype = smoothing != 0.0, logits.size(1), logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        p, local, here, kept, a, b, scale, columns = ctx.saved_tensors
        grad = grad.masked_fill(~kept, 0.0)  # a mean over no rows hands down infinities
        d = p * (scale * grad).unsqueeze(1)
        if p.size(1):
            if ctx.smooth:
                d -= (b * grad).unsqueeze(1) if columns is None else torch.outer(b * grad, columns)
            d.scatter_add_(1, local.unsqueeze(1), (-(a * grad) * here).unsqueeze(1))
        d = F.pad(d, (0, ctx.columns - d.size(1))) if d.size(1) < ctx.columns else d
        return d.to(ctx.dtype), None, None, None, None, None, None, None


def _accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    vocab_axis: str | None = None,
    batch_axes: tuple[str, ...] = (),
    *,
    vocab_size: int | None = None,
) -> Tensor:
    """Cross entropy of sharded logits; the value is a rank's *part* of the single-device loss.

    ``logits`` ``[N, V]`` (any shape that ``F.cross_entropy`` takes when ``vocab_axis`` is not in use), ``target`` ``[N]`` class indices,
    ``weight`` the whole ``[V]`` on every rank. ``vocab_axis``: the rank holds a contiguous slice of the classes; the value is the same on
    its ranks. ``batch_axes``: the rank holds some of the rows; the value is a summand, divided by the count (or total weight) of the rows
    of all ranks. ``vocab_size``: columns from there on are padding and count as absent. Half-precision logits are accumulated in float32.
    Raises ``ShardingError`` for class probabilities with ``vocab_axis``.
    """
    vocab = groups.find(vocab_axis)
    batch = groups.find_all(batch_axes)
    if vocab is None and vocab_size is not None and vocab_size < logits.size(1):
        logits = logits.narrow(1, 0, vocab_size)
    if vocab is None and (not batch or reduction == "none"):
        return F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    if vocab is None:
        rows = logits.to(_accumulate_dtype(logits.dtype))
        w = None if weight is None else weight.to(rows.dtype)
        target = target.to(rows.dtype) if target.is_floating_point() else target
        total = F.cross_entropy(rows, target, w, ignore_index=ignore_index, reduction="sum", label_smoothing=label_smoothing)
    else:
        if logits.dim() != 2 or target.is_floating_point():
            raise ShardingError(
                f"cross_entropy over vocabulary axis {vocab_axis!r} needs logits [N, V] and class indices [N], got logits "
                f"{tuple(logits.shape)} and {target.dtype} targets {tuple(target.shape)}; leave the vocabulary unsharded for this loss"
            )
        classes = logits.size(1) * vocab.size if vocab_size is None else vocab_size
        losses: Tensor = _VocabRows.apply(  # type: ignore[no-untyped-call]
            logits, target, weight, ignore_index, label_smoothing, classes, vocab.name, vocab.rank
        )
        if reduction == "none":
            return losses.to(logits.dtype)
        total = losses.sum()
    if reduction == "mean":
        total = total / _count(logits, target, weight, ignore_index, batch)
    return total.to(logits.dtype)


def _count(logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, batch: tuple[groups.Group, ...]) -> Tensor:
    """What the mean divides by: rows (or their total class weight) over all ranks, without the ignored ones."""
    dtype = _accumulate_dtype(logits.dtype)
    if target.is_floating_point():
        count = torch.full((), target.numel() / target.size(min(1, target.dim() - 1)), dtype=dtype, device=target.device)
    else:
        kept = target != ignore_index
        count = kept.sum() if weight is None else (weight.to(dtype)[target.masked_fill(~kept, 0)] * kept).sum()
        count = count.to(dtype)
    for group in batch:
        count = sum_over(count, group.name)
    return count

"""Vocabulary-parallel embedding and cross entropy with the meaning they have on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgc import _torch_compat as raw
from hgc.errors import ShardingError
from hgc.ir.ops import groups
from hgc.ir.ops.collectives import stack_over, sum_over


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
    """Loss of each row, ``[N]``, from this rank's columns of the logits; one small all-gather, no gathered logits."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
        classes: int,
        vocab: groups.Group,
    ) -> Tensor:
        first = vocab.rank * logits.size(1)
        valid = min(max(classes - first, 0), logits.size(1))  # columns past the vocabulary are padding
        z = logits.narrow(1, 0, valid).to(_accumulate_dtype(logits.dtype))
        kept = target != ignore_index
        here = kept & (target >= first) & (target < first + valid)
        local = (target - first).masked_fill(~here, 0)
        at_target = z.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(~here, 0.0) if valid else z.new_zeros(z.size(0))
        top = z.amax(1) if valid else z.new_full((z.size(0),), -torch.inf)
        top = top.clamp(min=torch.finfo(z.dtype).min)  # a row of minus infinities shall give exp(-inf) = 0, not NaN
        z = z - top.unsqueeze(1)
        w = None if weight is None else weight.to(z.dtype)
        columns = None if w is None else w.narrow(0, first, valid) if valid else w[:0]
        found = [top, at_target]
        if smoothing:
            found += [z.sum(1), torch.full_like(top, valid)] if columns is None else [(z * columns).sum(1), columns.sum().expand_as(top)]
        e = z.exp_()
        tops, at_targets, *sums, log_sums = stack_over(torch.stack([*found, e.sum(1).log()]), vocab.size, vocab.name).unbind(1)
        highest = tops.amax(0)
        log_total = torch.logsumexp(log_sums + (tops - highest), 0)
        # loss = a (log total - z_t) + b (W log total - sum_c w_c z_c), all z less the highest; rows that are ignored have a = b = 0
        mass = classes if w is None else w[:classes].sum()
        a = (1.0 - smoothing) * (kept.to(z.dtype) if w is None else w[target.masked_fill(~kept, 0)] * kept)
        loss = a * (log_total - (at_targets.sum(0) - highest))
        b = None
        if smoothing:
            b = kept.to(z.dtype) * (smoothing / classes)
            loss = loss + b * (mass * log_total - (sums[0] + (tops - highest) * sums[1]).sum(0))
        share = (top - highest - log_total).exp()  # of this rank's columns: e * share is the softmax
        ctx.save_for_backward(e, local, here, kept, a, b, (a if b is None else a + b * mass) * share, columns)
        ctx.columns, ctx.dtype = logits.size(1), logits.dtype
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        e, local, here, kept, a, b, scale, columns = ctx.saved_tensors
        grad = grad.masked_fill(~kept, 0.0)  # a mean over no rows hands down infinities
        d = e * (scale * grad).unsqueeze(1)
        if e.size(1):
            if b is not None:
                d -= (b * grad).unsqueeze(1) if columns is None else torch.outer(b * grad, columns)
            d.scatter_add_(1, local.unsqueeze(1), (-(a * grad) * here).unsqueeze(1))
        d = F.pad(d, (0, ctx.columns - d.size(1))) if d.size(1) < ctx.columns else d
        return d.to(ctx.dtype), None, None, None, None, None, None


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
    of all ranks. ``vocab_size``: columns from there on are padding and count as absent. Half-precision logits are accumulated in float32,
    and as with torch's own function the loss stays in float32 under autocast. Raises ``ShardingError`` for class probabilities with
    ``vocab_axis``.
    """
    vocab = groups.find(vocab_axis)
    batch = groups.find_all(batch_axes)
    if vocab is None and vocab_size is not None and vocab_size < logits.size(1):
        logits = logits.narrow(1, 0, vocab_size)
    if vocab is None and (not batch or reduction == "none"):
        return F.cross_entropy(logits, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
    returned = _accumulate_dtype(logits.dtype) if torch.is_autocast_enabled(logits.device.type) else logits.dtype
    count = _counted(logits, target, weight, ignore_index, batch) if reduction == "mean" else None  # under way while the loss is computed
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
            logits, target, weight, ignore_index, label_smoothing, classes, vocab
        )
        if reduction == "none":
            return losses.to(returned)
        total = losses.sum()
    if count is not None:
        total = total / count()
    return total.to(returned)


def _counted(
    logits: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, batch: tuple[groups.Group, ...]
) -> Callable[[], Tensor]:
    """Start counting what the mean divides by: rows (or their total class weight) over all ranks, without the ignored ones."""
    dtype = _accumulate_dtype(logits.dtype)
    if target.is_floating_point():
        count = torch.full((), target.numel() / target.size(min(1, target.dim() - 1)), dtype=dtype, device=target.device)
    else:
        kept = target != ignore_index
        count = kept.sum() if weight is None else (weight.to(dtype)[target.masked_fill(~kept, 0)] * kept).sum()
        count = count.to(dtype)
    if not batch:
        return lambda: count
    first, *others = batch
    started = raw.start_all_reduce(count, "sum", first.name)

    def finish() -> Tensor:
        total = raw.finished(started)
        for group in others:
            total = sum_over(total, group.name)
        return total

    return finish

"""Batch normalisation whose statistics span the ranks that share a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgc.ir.ops import groups
from hgc.ir.ops.collectives import stack_over, sum_over


class _BatchNorm(torch.autograd.Function):
    """Normalise with statistics of all ranks; every rank holds the same number of rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        eps: float,
        count: int,
        names: tuple[str, ...],
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var)
        ctx.eps, ctx.count, ctx.names, ctx.has_bias = eps, count, names, bias is not None
        return F.batch_norm(x, mean, var, weight, bias, training=False, eps=eps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight, mean, var = ctx.saved_tensors
        wide = mean.dtype
        shape = [1, -1] + [1] * (x.dim() - 2)
        dims = [d for d in range(x.dim()) if d != 1]
        scale = torch.rsqrt(var + ctx.eps)
        g = grad.to(wide)
        normal = (x.to(wide) - mean.view(shape)) * scale.view(shape)
        sums = torch.stack([g.sum(dims), (g * normal).sum(dims)])
        grad_bias, grad_weight = sums.unbind(0)
        total = sums
        for name in ctx.names:
            total = sum_over(total, name)
        along_mean, along_var = (total / ctx.count).unbind(0)
        inner = g - along_mean.view(shape) - normal * along_var.view(shape)
        grad_x = inner * (scale if weight is None else scale * weight.to(wide)).view(shape)
        grads = None if weight is None else grad_weight.to(weight.dtype), grad_bias if ctx.has_bias else None
        return grad_x.to(x.dtype), *grads, None, None, None, None, None


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    var: Tensor | None,
    training: bool,
    momentum: float = 0.1,
    eps: float = 1e-5,
    batch_axes: tuple[str, ...] = (),
) -> Tensor:
    """``F.batch_norm`` of ``x`` ``[N, C, ...]`` with the rows of all ranks of ``batch_axes`` as one batch.

    Each rank must hold equally many rows. ``mean`` and ``var`` ``[C]`` are the running statistics, updated in place as on one
    device (unbiased variance of the global batch). Gradients are exact; those of ``weight`` and ``bias`` are the rank's part (kind R).
    """
    batch = groups.find_all(batch_axes)
    use_batch_statistics = training or mean is None or var is None
    if not batch or not use_batch_statistics:
        return F.batch_norm(x, mean, var, weight, bias, training=use_batch_statistics, momentum=momentum, eps=eps)
    with torch.no_grad():
        batch_mean, batch_var, count = _statistics(x, batch)
        if mean is not None and var is not None:
            mean.lerp_(batch_mean.to(mean.dtype), momentum)
            var.lerp_((batch_var * (count / (count - 1))).to(var.dtype), momentum)
    names = tuple(group.name for group in batch)
    out: Tensor = _BatchNorm.apply(x, weight, bias, batch_mean, batch_var, eps, count, names)  # type: ignore[no-untyped-call]
    return out


def _statistics(x: Tensor, batch: tuple[groups.Group, ...]) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance ``[C]`` over all ranks, and the number of values behind each."""
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
    dims = [d for d in range(x.dim()) if d != 1]
    var, mean = torch.var_mean(x.to(wide), dims, correction=0)
    count = x.numel() // x.size(1)
    for group in batch:
        means, variances = stack_over(torch.stack([mean, var]), group.size, group.name).unbind(1)
        spread, mean = torch.var_mean(means, 0, correction=0)
        var = variances.mean(0) + spread
        count *= group.size
    return mean, var, count

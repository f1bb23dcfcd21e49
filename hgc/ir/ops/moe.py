"""Mixture of experts in three operators: sort token copies by expert, multiply each group by its expert, put the results back.

Routers, gates, activations, expert biases and shared experts stay ordinary operators between them. Names: ``T`` tokens,
``K`` experts chosen by each, ``E`` experts, ``R = T * K`` rows, one for each token and choice, in the order of their experts.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token to the experts that it chose.

    Args:
        x: [T, H] tokens
        experts: [T, K] integers below ``num_experts``

    Returns
        rows: [R, H], the tokens of expert 0 first, each expert's in the order of ``x``
        offsets: [E] int32, where each expert's rows end
        order: [R] int64, the flat index into ``experts`` that each row came from
    """
    chosen = experts.reshape(-1)
    order = torch.argsort(chosen, stable=True)
    # not bincount, which makes the host wait for a GPU to learn the size of its result
    chosen = chosen.long()
    counts = chosen.new_zeros(num_experts).scatter_add_(0, chosen, torch.ones_like(chosen))
    offsets = counts.cumsum(0).to(torch.int32)
    return _ToRows.apply(x, order, experts.shape[1]), offsets, order  # type: ignore[no-untyped-call]


def grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    """Multiply each expert's rows by its own matrix.

    Args:
        rows: [R, I]
        weight: [E, O, I], or [E, I, O] if ``transposed``
        offsets: [E] int32, where each expert's rows end

    Returns [R, O].
    """
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return F.grouped_mm(rows, weight if transposed else weight.transpose(1, 2), offs=offsets)
    ends = offsets.tolist()
    groups = torch.split(rows, [end - start for start, end in zip([0, *ends], ends, strict=False)])
    matrices = weight.transpose(1, 2).unbind() if transposed else weight.unbind()
    return torch.cat([F.linear(group, matrix) for group, matrix in zip(groups, matrices, strict=True)])


def moe_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's expert results.

    Args:
        rows: [R, H]
        order: [R] from :func:`moe_dispatch`
        weights: [T, K]

    Returns [T, H]: ``sum_k weights[t, k] * result of the k-th choice of token t``, in ``rows``' dtype.
    """
    tokens, choices = weights.shape
    chosen: Tensor = _Permute.apply(rows, order).view(tokens, choices, -1)  # type: ignore[no-untyped-call]
    return (chosen * weights.unsqueeze(-1)).sum(1).to(rows.dtype)


def _inverse(order: Tensor) -> Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class _ToRows(torch.autograd.Function):
    """``x[order // choices]``; the backward gathers and sums, which unlike a scatter gives the same bits every time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.choices = choices
        return x.index_select(0, order // choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,), (order,) = grads, ctx.saved_tensors
        back = grad.index_select(0, _inverse(order))
        return back.view(-1, ctx.choices, grad.shape[1]).sum(1), None, None


class _Permute(torch.autograd.Function):
    """``out[order] = rows``."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, _inverse(order))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (grad,), (order,) = grads, ctx.saved_tensors
        return grad.index_select(0, order), None

"""Operators that exist during capture only: each keeps one call of the model a single node of the captured graph.

``hgc::attention`` and the three mixture-of-experts operators are replaced by the functions of ``hgc.ir.ops`` that compute
them; ``hgc::enter``, ``hgc::exit`` and ``hgc::call`` mark the borders of blocks and vanish when the program is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from hgc.ir.ops.attention import attention as run_attention
from hgc.ir.ops.moe import grouped_linear as run_grouped_linear
from hgc.ir.ops.moe import moe_combine as run_moe_combine
from hgc.ir.ops.moe import moe_dispatch as run_moe_dispatch


def _never_runs(name: str) -> NoReturn:
    raise RuntimeError(f"{name} exists during tracing only")


@torch.library.custom_op("hgc::attention", mutates_args=())
def attention(
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
    _never_runs("hgc::attention")


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    # [B, S, H, D] in memory, as the fast kernels return it: the merge of the heads that follows is then a view.
    return q.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)


@torch.library.custom_op("hgc::moe_dispatch", mutates_args=())
def moe_dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    _never_runs("hgc::moe_dispatch")


@moe_dispatch.register_fake
def _(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = experts.shape[0] * experts.shape[1]
    return x.new_empty(rows, x.shape[1]), experts.new_empty(num_experts, dtype=torch.int32), experts.new_empty(rows, dtype=torch.int64)


@torch.library.custom_op("hgc::grouped_linear", mutates_args=())
def grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    _never_runs("hgc::grouped_linear")


@grouped_linear.register_fake
def _(rows: Tensor, weight: Tensor, offsets: Tensor, transposed: bool) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[2] if transposed else weight.shape[1])


@torch.library.custom_op("hgc::moe_combine", mutates_args=())
def moe_combine(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    _never_runs("hgc::moe_combine")


@moe_combine.register_fake
def _(rows: Tensor, order: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty(weights.shape[0], rows.shape[1])


RUNTIME: dict[Any, Callable[..., Any]] = {
    torch.ops.hgc.attention.default: run_attention,
    torch.ops.hgc.moe_dispatch.default: run_moe_dispatch,
    torch.ops.hgc.grouped_linear.default: run_grouped_linear,
    torch.ops.hgc.moe_combine.default: run_moe_combine,
}
"""What a capture-only operator becomes in the program."""


def _like(x: Tensor) -> Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=x.device)


@torch.library.custom_op("hgc::enter", mutates_args=())
def enter(region: int, xs: list[Tensor]) -> list[Tensor]:
    """The tensors that a module call receives."""
    _never_runs("hgc::enter")


@torch.library.custom_op("hgc::exit", mutates_args=())
def exit(region: int, xs: list[Tensor]) -> list[Tensor]:
    """The tensors that a module call returns."""
    _never_runs("hgc::exit")


@torch.library.custom_op("hgc::call", mutates_args=())
def call(region: int, xs: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    """A module call that is not traced because an equal module was; ``like`` are that module's outputs."""
    _never_runs("hgc::call")


@enter.register_fake
@exit.register_fake
def _(region: int, xs: list[Tensor]) -> list[Tensor]:
    return [_like(x) for x in xs]


@call.register_fake
def _(region: int, xs: list[Tensor], like: list[Tensor]) -> list[Tensor]:
    return [_like(x) for x in like]


ENTER = torch.ops.hgc.enter.default
EXIT = torch.ops.hgc.exit.default
CALL = torch.ops.hgc.call.default

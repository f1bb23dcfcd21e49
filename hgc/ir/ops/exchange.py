"""Ulysses: ranks that hold a share of the sequence trade it for a share of the heads around attention, and back.

The idea is DeepSpeed-Ulysses' (https://arxiv.org/abs/2309.14509): each rank then attends over the whole sequence with its own heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from hgc.ir.ops import groups
from hgc.ir.ops.collectives import all_to_all
from hgc.ir.ops.layout import take

_HEADS, _SEQUENCE = 1, 2

Core: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""Attention of q, k, v, bias and sinks, everything else given."""


def exchanged(core: Core, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, axis: str | None) -> Tensor:
    """``core`` on all positions and a share of the heads, for inputs with a share of the positions and all heads.

    Args:
        q: [B, H, S / n, D]
        k, v: [B, G, T / n, D or E]; heads that ``n`` does not divide are repeated until it does
        bias: broadcastable to [B, H, S, T], whole
        sinks: [H], whole

    Returns [B, H, S / n, E]. Gradients of ``bias`` and ``sinks`` are the rank's part (kind R).
    """
    group = groups.find(axis)
    if group is None or axis is None:
        return core(q, k, v, bias, sinks)
    heads, ranks = q.size(_HEADS), group.size
    repeats = key_value_repeats(k.size(_HEADS), ranks)
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, _HEADS), v.repeat_interleave(repeats, _HEADS)
    q, k, v = (all_to_all(x, _SEQUENCE, _HEADS, axis) for x in (q, k, v))
    if bias is not None and bias.dim() >= 3 and bias.size(-3) == heads > 1:
        bias = take(bias, bias.dim() - 3, group.rank, ranks)
    if sinks is not None:
        sinks = take(sinks, 0, group.rank, ranks)
    return all_to_all(core(q, k, v, bias, sinks), _HEADS, _SEQUENCE, axis)


def key_value_repeats(groups_of_heads: int, ranks: int) -> int:
    """How often each key-value head is sent, so that every rank gets those that its query heads read."""
    return ranks // math.gcd(groups_of_heads, ranks)

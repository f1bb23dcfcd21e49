"""Reductions whose meaning changes when the reduced dim is sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hgc.ir.ops import groups


def mean(
    x: torch.Tensor,
    dim: Sequence[int] | None = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    batch_axes: tuple[str, ...] = (),
) -> torch.Tensor:
    """This rank's part of a mean over dims that are sharded over ``batch_axes``: the sum over ranks is the mean of the global tensor."""
    local = x.mean(dtype=dtype) if not dim else x.mean(list(dim), keepdim, dtype=dtype)
    ranks = 1
    for axis in batch_axes:
        ranks *= groups.axis_size(axis)
    return local / ranks if ranks > 1 else local

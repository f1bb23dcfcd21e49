"""The price of moving a value from one placement to another on an axis, and the operator that does it."""

from __future__ import annotations

import math
from typing import Any

from hgc.ir import ops
from hgc.ir.placement import Invariant, Partial, Placement, Shard, is_whole, zigzag_runs
from hgc.ir.rules.by_expert import is_by_expert

_SLICE = 1e-3
"""Bytes a local slice counts for each byte of the tensor: enough to prefer doing nothing."""

_SCATTER_GAIN = 0.05
"""A scatter, forward and backward, sends as much as an all-reduce and leaves less to compute and to keep: preferred by this share."""


def price(
    source: Placement, target: Placement, size_bytes: float, ranks: int, needs_gradient: bool, scatter_dim: int | None, is_state: bool
) -> float:
    """Bytes that each rank sends for the change and its backward, ring algorithms; infinite where no operator does it.

    ``scatter_dim`` is the only dim onto which partial sums are scattered; only state (a bias) becomes a summand of partial sums.
    """
    ring = size_bytes * (ranks - 1) / ranks
    if source == target:
        return 0.0
    if isinstance(target, Partial):
        return size_bytes * _SLICE if source == Invariant() and is_state else math.inf
    if is_whole(source):
        return ring if needs_gradient else size_bytes * _SLICE
    if isinstance(source, Partial):
        if is_whole(target):
            return 2 * ring
        return 2 * ring * (1 - _SCATTER_GAIN) if target == Shard(scatter_dim if scatter_dim is not None else -1) else math.inf
    if is_whole(target):
        return math.inf if is_by_expert(source) else 2 * ring if needs_gradient else ring
    assert isinstance(source, Shard)
    assert isinstance(target, Shard)
    return 2 * ring / ranks if source.is_plain and target.is_plain else math.inf


def operator_for(source: Placement, target: Placement) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Operator, positional arguments before the axis, and keyword arguments. The kind of whole values is settled afterwards."""
    if isinstance(target, Partial):
        return ops.as_partial, (), {}
    if is_whole(source):
        assert isinstance(target, Shard)
        return ops.shard, (target.dim,), _parts(target)
    if isinstance(source, Partial):
        if is_whole(target):
            return ops.all_reduce, (), {}
        assert isinstance(target, Shard)
        return ops.reduce_scatter, (target.dim,), {}
    assert isinstance(source, Shard)
    if is_whole(target):
        return ops.all_gather, (source.dim,), _parts(source)
    assert isinstance(target, Shard)
    return ops.all_to_all, (source.dim, target.dim), {}


def _parts(shard: Shard) -> dict[str, Any]:
    runs = zigzag_runs(shard.parts)
    if runs is not None:
        return {"zigzag": True} if runs == 1 else {"parts": runs, "zigzag": True}
    return {} if shard.is_plain else {"parts": shard.parts}

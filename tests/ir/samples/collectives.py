"""Collectives, on their own axis and as ordinary operators on another one."""

from __future__ import annotations

from typing import Any

from hgc.ir import ops
from tests.ir.rule_harness import Sample
from tests.ir.samples.registry import Draw, sample


@sample(ops.copy_in, ops.as_invariant, ops.as_partial, ops.all_reduce, ops.all_reduce_r)
def sums_and_copies(d: Draw, target: Any) -> Sample:
    return Sample(target, (d.real(*d.shape(0)), d.pick(*d.axes)))


@sample(ops.all_gather, ops.all_gather_i, ops.shard, ops.shard_r)
def along_dim(d: Draw, target: Any) -> Sample:
    n = d.ranks
    shape = [4 * n, d.size(), n * n * 6]
    dim, parts = d.pick((0, 1), (0, 2), (2, 1), (2, 3), (0, (n * 3, n)), (0, (n, n)))
    axis = d.pick(*d.axes)
    if isinstance(parts, tuple):
        shape[0] = sum(parts) * d.pick(1, *[n] * d.axes.index(axis))  # parts of the whole, or of what an earlier axis leaves
    return Sample(target, (d.real(*shape), dim, axis), {"parts": parts} if parts != 1 else {})


@sample(ops.reduce_scatter)
def reduce_scatter(d: Draw, target: Any) -> Sample:
    shape = [d.ranks * d.ranks, d.size(), 2 * d.ranks]
    return Sample(target, (d.real(*shape), d.pick(0, 2), d.pick(*d.axes)))


@sample(ops.all_to_all)
def all_to_all(d: Draw, target: Any) -> Sample:
    shape = [d.ranks * d.ranks, d.size(), 2 * d.ranks * d.ranks]
    source, destination = d.pick((0, 2), (2, 0))
    return Sample(target, (d.real(*shape), source, destination, d.pick(*d.axes)))

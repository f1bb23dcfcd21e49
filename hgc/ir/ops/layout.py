"""Which part of a tensor dim a rank holds: plain and strided shards, as pure functions of tensors.

``parts`` means what it means in :class:`hgc.ir.placement.Shard`: the dim is a concatenation of parts and every rank holds the
concatenation of its slice of each part. An integer counts equal parts, a tuple lists their (global) sizes, 1 is the plain shard,
:class:`Zigzag` the order of causal ring attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import sympy
import torch
from torch import Tensor

from hgc.errors import ShardingError
from hgc.ir.placement import Shard, zigzag_runs


@dataclass(frozen=True)
class Zigzag:
    """The dim is ``runs`` sequences; of each, cut in twice as many chunks as ranks, a rank holds one chunk and the one that mirrors it.

    Rank ``r`` of ``n`` holds chunks ``r`` and ``2n - 1 - r``: one early and one late, so that under a causal mask all have equal work.
    """

    runs: int = 1


Parts: TypeAlias = int | tuple[int, ...]
Order: TypeAlias = Parts | Zigzag


def order_of(shard: Shard) -> Order:
    """The parts of a placement whose sizes are numbers."""
    runs = zigzag_runs(shard.parts)
    if runs is not None:
        return Zigzag(int(runs))
    assert not isinstance(shard.parts, sympy.Expr), f"{shard} has a symbolic number of parts"
    return shard.parts


def check_divides(length: int, ranks: int, dim: int, parts: Order = 1) -> None:
    """Raise :class:`ShardingError` unless every part of a dim of size ``length`` splits evenly."""
    if isinstance(parts, tuple):
        if sum(parts) != length:
            raise ShardingError(f"parts {parts} add up to {sum(parts)}, but dim {dim} has size {length}; list the sizes of all parts")
        uneven = next((size for size in parts if size % ranks), None)
        if uneven is not None:
            raise ShardingError(f"a part of size {uneven} of dim {dim} does not divide among {ranks} ranks; pad it or use fewer ranks")
    elif isinstance(parts, Zigzag):
        if length % (2 * parts.runs * ranks):
            raise ShardingError(
                f"dim {dim} of size {length} does not divide into {2 * ranks} chunks for the zigzag order of {ranks} ranks; "
                f"pad it to a multiple of {2 * parts.runs * ranks}"
            )
    elif length % (parts * ranks):
        counted = f" in {parts} equal parts" if parts != 1 else ""
        raise ShardingError(f"dim {dim} of size {length}{counted} does not divide among {ranks} ranks; pad it or use fewer ranks")


def take(x: Tensor, dim: int, rank: int, ranks: int, parts: Order = 1) -> Tensor:
    """The shard of rank ``rank``: a view for plain shards, else maybe a copy."""
    check_divides(x.size(dim), ranks, dim, parts)
    if isinstance(parts, Zigzag):
        halves = torch.unflatten(x, dim, (parts.runs, 2, ranks, x.size(dim) // (2 * parts.runs * ranks)))
        chosen = [halves.select(dim + 1, 0).select(dim + 1, rank), halves.select(dim + 1, 1).select(dim + 1, ranks - 1 - rank)]
        return torch.stack(chosen, dim + 1).flatten(dim, dim + 2)
    if isinstance(parts, tuple):
        pieces = torch.split(x, list(parts), dim)
        return torch.cat([piece.narrow(dim, rank * (piece.size(dim) // ranks), piece.size(dim) // ranks) for piece in pieces], dim)
    if parts == 1:
        local = x.size(dim) // ranks
        return x.narrow(dim, rank * local, local)
    return torch.unflatten(x, dim, (parts, ranks, x.size(dim) // (parts * ranks))).select(dim + 1, rank).flatten(dim, dim + 1)


def rank_major(x: Tensor, dim: int, ranks: int, parts: Order = 1) -> Tensor:
    """All shards stacked along a new leading dim: ``[ranks, *local shape]``, the layout that collectives exchange."""
    check_divides(x.size(dim), ranks, dim, parts)
    if isinstance(parts, tuple | Zigzag):
        return torch.stack([take(x, dim, rank, ranks, parts) for rank in range(ranks)])
    if parts == 1:
        return torch.unflatten(x, dim, (ranks, x.size(dim) // ranks)).movedim(dim, 0)
    return torch.unflatten(x, dim, (parts, ranks, x.size(dim) // (parts * ranks))).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def join(shards: Tensor, dim: int, parts: Order = 1) -> Tensor:
    """Inverse of :func:`rank_major`: ``[ranks, *local shape]`` to the whole tensor; ``parts`` are global sizes."""
    ranks = shards.size(0)
    if isinstance(parts, Zigzag):
        halves = torch.unflatten(shards, dim + 1, (parts.runs, 2, shards.size(dim + 1) // (2 * parts.runs)))
        both = torch.stack([halves.select(dim + 2, 0), halves.select(dim + 2, 1).flip(0)], dim + 2)
        return both.movedim(0, dim + 2).flatten(dim, dim + 3)
    if isinstance(parts, tuple):
        split = torch.split(shards, [size // ranks for size in parts], dim + 1)
        return torch.cat([join(part, dim) for part in split], dim)
    if parts == 1:
        return torch.cat(shards.unbind(0), dim) if dim else shards.flatten(0, 1)
    local = torch.unflatten(shards, dim + 1, (parts, shards.size(dim + 1) // parts))
    return local.movedim(0, dim + 1).flatten(dim, dim + 2)


def local_parts(parts: Parts, ranks: int) -> Parts:
    """Sizes of the parts on one rank."""
    return tuple(size // ranks for size in parts) if isinstance(parts, tuple) else parts

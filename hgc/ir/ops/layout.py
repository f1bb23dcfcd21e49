"""Which part of a tensor dim a rank holds: plain and strided shards, as pure functions of tensors.

``parts`` means what it means in :class:`hgc.ir.placement.Shard`: the dim is a concatenation of parts and every rank holds the
concatenation of its slice of each part. An integer counts equal parts, a tuple lists their (global) sizes, 1 is the plain shard.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from hgc.errors import ShardingError

Parts: TypeAlias = int | tuple[int, ...]


def check_divides(length: int, ranks: int, dim: int, parts: Parts = 1) -> None:
    """Raise :class:`ShardingError` unless every part of a dim of size ``length`` splits evenly."""
    if isinstance(parts, tuple):
        if sum(parts) != length:
            raise ShardingError(f"parts {parts} add up to {sum(parts)}, but dim {dim} has size {length}; list the sizes of all parts")
        uneven = next((size for size in parts if size % ranks), None)
        if uneven is not None:
            raise ShardingError(f"a part of size {uneven} of dim {dim} does not divide among {ranks} ranks; pad it or use fewer ranks")
    elif length % (parts * ranks):
        counted = f" in {parts} equal parts" if parts != 1 else ""
        raise ShardingError(f"dim {dim} of size {length}{counted} does not divide among {ranks} ranks; pad it or use fewer ranks")


def take(x: Tensor, dim: int, rank: int, ranks: int, parts: Parts = 1) -> Tensor:
    """The shard of rank ``rank``: a view for plain shards, else maybe a copy."""
    check_divides(x.size(dim), ranks, dim, parts)
    if isinstance(parts, tuple):
        pieces = torch.split(x, list(parts), dim)
        return torch.cat([piece.narrow(dim, rank * (piece.size(dim) // ranks), piece.size(dim) // ranks) for piece in pieces], dim)
    if parts == 1:
        local = x.size(dim) // ranks
        return x.narrow(dim, rank * local, local)
    return torch.unflatten(x, dim, (parts, ranks, x.size(dim) // (parts * ranks))).select(dim + 1, rank).flatten(dim, dim + 1)


def rank_major(x: Tensor, dim: int, ranks: int, parts: Parts = 1) -> Tensor:
    """All shards stacked along a new leading dim: ``[ranks, *local shape]``, the layout that collectives exchange."""
    check_divides(x.size(dim), ranks, dim, parts)
    if isinstance(parts, tuple):
        return torch.stack([take(x, dim, rank, ranks, parts) for rank in range(ranks)])
    if parts == 1:
        return torch.unflatten(x, dim, (ranks, x.size(dim) // ranks)).movedim(dim, 0)
    return torch.unflatten(x, dim, (parts, ranks, x.size(dim) // (parts * ranks))).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)


def join(shards: Tensor, dim: int, parts: Parts = 1) -> Tensor:
    """Inverse of :func:`rank_major`: ``[ranks, *local shape]`` to the whole tensor; ``parts`` are global sizes."""
    ranks = shards.size(0)
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

"""How much of a value passes from rank to rank when it changes meshes: what ``exchange`` sends, counted without making its pieces."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from hgc.ir.ops.layout import order_of, take
from hgc.ir.placement import Shard
from hgc.runtime.executor_exchange import Replicas, Side, wants_nothing


def volume(source: Side, target: Side, shape: Sequence[int], gradient: bool = False) -> Tensor:
    """``[ranks of source, ranks of target]``, float64: elements that the one gives to the other.

    Sums of ``numel`` of the transfers of :func:`~hgc.runtime.executor_exchange.exchange`, also of those of a rank to itself, which do
    not travel. Raises ``ShardingError`` if the shape does not divide.
    """
    common = torch.ones(source.devices, target.devices, dtype=torch.float64)
    for dim, length in enumerate(shape):
        common *= _positions(source, dim, length) @ _positions(target, dim, length).T
    if gradient:
        common[:, [place for place, unwanted in enumerate(wants_nothing(target)) if unwanted]] = 0
    given = [[0] * target.devices for _ in range(source.devices)]
    holdings = _holdings(source)
    replicas = Replicas(holdings)
    for place, amounts in enumerate(common.T.long().tolist()):
        own = target.first_rank + place - source.first_rank
        for content in dict.fromkeys(itertools.compress(holdings, amounts)):
            amount = amounts[replicas.contents[content][0]]
            given[replicas.sender(content, place, own, amount)][place] = amount
    return torch.tensor(given, dtype=torch.float64)


@lru_cache(maxsize=1 << 12)
def _positions(where: Side, dim: int, length: int) -> Tensor:
    """``[ranks, length]``: 1 where a rank holds a position of the dim."""
    placements = where.parsed()
    shards = [(axis, size, found) for axis, size in where.mesh if isinstance(found := placements.get(axis), Shard) and found.dim == dim]
    held = torch.zeros(where.devices, length, dtype=torch.float64)
    for place, coordinates in enumerate(where.coordinates()):
        index = torch.arange(length)
        for axis, size, shard in shards:
            index = take(index, 0, coordinates[axis], size, order_of(shard))
        held[place, index] = 1
    return held


@lru_cache(maxsize=1 << 12)
def _holdings(where: Side) -> list[tuple[int, ...]]:
    """Of each place what tells its part from others."""
    placements = where.parsed()
    axes = [axis for axis, _ in where.mesh if isinstance(placements.get(axis), Shard)]
    return [tuple(coordinates[axis] for axis in axes) for coordinates in where.coordinates()]

"""Who sends which part of a value to whom when it passes from one mesh to another: boxes that sender and receiver have in common."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Generic, TypeVar

import torch

from hgc.ir.ops.layout import order_of, take
from hgc.ir.placement import Placement, Replicated, Shard, parse_placement
from hgc.runtime.shards import Box

Content = TypeVar("Content")


@dataclass(frozen=True)
class Side:
    """Where a value lives: on the ranks of a mesh from ``first_rank`` on, the last axis fastest; whole on axes that are not named."""

    first_rank: int
    mesh: tuple[tuple[str, int], ...]
    placements: tuple[tuple[str, str], ...]

    @property
    def devices(self) -> int:
        return math.prod(size for _, size in self.mesh)

    def coordinates(self) -> Iterator[dict[str, int]]:
        """Of each rank, in order."""
        for values in itertools.product(*(range(size) for _, size in self.mesh)):
            yield {axis: value for (axis, _), value in zip(self.mesh, values, strict=True)}

    def parsed(self) -> dict[str, Placement]:
        return _parsed(self.placements)


@lru_cache(maxsize=1 << 10)
def _parsed(placements: tuple[tuple[str, str], ...]) -> dict[str, Placement]:
    return {axis: parse_placement(text) for axis, text in placements}


def side(first_rank: int, mesh: Mapping[str, int], placements: Mapping[str, str]) -> Side:
    return Side(first_rank, tuple(mesh.items()), tuple(placements.items()))


@dataclass(frozen=True)
class Region:
    """A box of a local tensor: start and size in each dim."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        for dim, (first, length) in enumerate(zip(self.start, self.size, strict=True)):
            local = local.narrow(dim, first, length)
        return local

    @property
    def numel(self) -> int:
        return math.prod(self.size)


@dataclass(frozen=True)
class Transfer:
    """What one rank sends to another: pieces, each as a region of what the sender holds and of what the receiver will hold."""

    source: int
    target: int
    pieces: tuple[tuple[Region, Region], ...]

    @property
    def numel(self) -> int:
        return sum(region.numel for region, _ in self.pieces)


def exchange(source: Side, target: Side, shape: Sequence[int], gradient: bool = False) -> tuple[Transfer, ...]:
    """Each element reaches each rank that shall hold it exactly once; a rank that is on both sides keeps what it has.

    Of several ranks that hold an element the one with the least to send sends it, of equal ones that in the same place of its mesh, so
    that equal meshes exchange aligned messages. With ``gradient`` the value flows back: where the target made it ``R``, its gradient is a
    sum over ranks, so the first of them gets it all and the others nothing (zero). Raises ``ShardingError`` if the shape does not divide.
    """
    wanted = _held(target, shape)
    if gradient:
        wanted = [() if unwanted else boxes for boxes, unwanted in zip(wanted, wants_nothing(target), strict=True)]
    return transfers(source.first_rank, _held(source, shape), target.first_rank, wanted)


def wants_nothing(where: Side) -> list[bool]:
    """Of each place: does it get no gradient, because it adds up its own with that of another place, which gets it all?"""
    summed = [axis for axis, found in where.parsed().items() if found == Replicated()]
    return [any(coordinates[axis] for axis in summed) for coordinates in where.coordinates()]


def transfers(
    first_source: int, held: Sequence[tuple[Box, ...]], first_target: int, wanted: Sequence[tuple[Box, ...]]
) -> tuple[Transfer, ...]:
    """The same for any boxes: ``held`` by the ranks from ``first_source`` on, ``wanted`` by those from ``first_target`` on."""
    replicas = Replicas(held)
    found = []
    for place, needed in enumerate(wanted):
        for boxes in replicas.contents:
            pieces = tuple(piece for a in boxes for b in needed for piece in _common(a, b))
            if pieces:
                amount = sum(region.numel for region, _ in pieces)
                sender = replicas.sender(boxes, place, first_target + place - first_source, amount)
                found.append(Transfer(first_source + sender, first_target + place, pieces))
    return tuple(found)


class Replicas(Generic[Content]):
    """Places grouped by what they hold, ``contents``, and how much each has been given to send."""

    def __init__(self, held: Sequence[Content]) -> None:
        self._load = [0] * len(held)
        self.contents: dict[Content, list[int]] = {}
        for place, content in enumerate(held):
            self.contents.setdefault(content, []).append(place)

    def sender(self, content: Content, place: int, own: int, amount: int) -> int:
        """The place that sends so much of a content to a place of the target, which is ``own`` if it is one of the source's.

        That takes its own, for nothing travels then; else the one with the least to send, if several the one in the same place.
        """
        places = self.contents[content]
        if own in places:
            return own
        chosen = min(places, key=lambda candidate: (self._load[candidate], candidate != place))
        self._load[chosen] += amount
        return chosen


def local_shape(where: Side, shape: Sequence[int]) -> tuple[int, ...]:
    """What each rank of a side holds; all hold equal shapes."""
    sizes = list(shape)
    for axis, size in where.mesh:
        found = where.parsed().get(axis)
        if isinstance(found, Shard):
            sizes[found.dim] //= size
    return tuple(sizes)


def _held(where: Side, shape: Sequence[int]) -> list[tuple[Box, ...]]:
    """The boxes of each rank."""
    known: dict[tuple[int, ...], tuple[Box, ...]] = {}
    shards = [(axis, size, found) for axis, size in where.mesh if isinstance(found := where.parsed().get(axis), Shard)]
    boxes = []
    for coordinates in where.coordinates():
        key = tuple(coordinates[axis] for axis, _, _ in shards)
        if key not in known:
            dims = [_segments(length, dim, shards, coordinates) for dim, length in enumerate(shape)]
            known[key] = tuple(
                Box(tuple(s[0] for s in chosen), tuple(s[1] for s in chosen), tuple(s[2] for s in chosen))
                for chosen in itertools.product(*dims)
            )
        boxes.append(known[key])
    return boxes


def _segments(
    length: int, dim: int, shards: Sequence[tuple[str, int, Shard]], coordinates: Mapping[str, int]
) -> list[tuple[int, int, int]]:
    """Runs of a dim that a rank holds: where each starts in the whole and in its own, and how long it is."""
    own = [(axis, size, shard) for axis, size, shard in shards if shard.dim == dim]
    if not own:
        return [(0, 0, length)]
    index = torch.arange(length)
    for axis, size, shard in own:
        index = take(index, 0, coordinates[axis], size, order_of(shard))
    breaks = [0, *((index[1:] != index[:-1] + 1).nonzero().flatten() + 1).tolist(), len(index)]
    return [(int(index[first]), first, last - first) for first, last in itertools.pairwise(breaks)]


def _common(a: Box, b: Box) -> Iterator[tuple[Region, Region]]:
    low = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    high = tuple(min(x + n, y + m) for x, n, y, m in zip(a.start, a.size, b.start, b.size, strict=True))
    if all(first < last for first, last in zip(low, high, strict=True)):
        size = tuple(last - first for first, last in zip(low, high, strict=True))
        yield _region(a, low, size), _region(b, low, size)


def _region(box: Box, start: tuple[int, ...], size: tuple[int, ...]) -> Region:
    return Region(tuple(own + first - begin for own, first, begin in zip(box.local, start, box.start, strict=True)), size)

"""Which boxes of a whole tensor a rank holds, as a pure function of mesh and coordinates.

Everything that crosses plans (loading, gathering, checkpoints) goes through boxes: a plain shard is one, a strided shard one for each part.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from hgc.errors import ShardingError
from hgc.ir.ops.layout import Parts, check_divides


@dataclass(frozen=True)
class Split:
    """A dim split over one or several mesh axes (major first). ``uneven``: in chunks of equal size of which the last may be short."""

    axes: tuple[str, ...]
    dim: int
    parts: Parts = 1
    uneven: bool = False


@dataclass(frozen=True)
class Box:
    """A contiguous region: where it starts in the whole tensor and in the rank's own, and its size."""

    start: tuple[int, ...]
    local: tuple[int, ...]
    size: tuple[int, ...]

    def of_whole(self, whole: Tensor) -> Tensor:
        return _region(whole, self.start, self.size)

    def of_local(self, local: Tensor) -> Tensor:
        return _region(local, self.local, self.size)


def _region(x: Tensor, start: tuple[int, ...], size: tuple[int, ...]) -> Tensor:
    for dim, (first, length) in enumerate(zip(start, size, strict=True)):
        x = x.narrow(dim, first, length)
    return x


@dataclass(frozen=True)
class Layout:
    """A tensor of the user's shape, padded to ``padded``, and split in the order of ``splits``."""

    shape: tuple[int, ...]
    padded: tuple[int, ...]
    splits: tuple[Split, ...] = ()

    def axes(self) -> tuple[str, ...]:
        """Mesh axes along which ranks hold different parts."""
        return tuple(dict.fromkeys(axis for split in self.splits for axis in split.axes))


@dataclass(frozen=True)
class _Segment:
    start: int
    local: int
    length: int


def local_shape(layout: Layout, mesh: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[int, ...]:
    """Shape of the tensor that a rank allocates."""
    return tuple(length for length, _ in _dims(layout, mesh, coordinates))


def boxes(layout: Layout, mesh: Mapping[str, int], coordinates: Mapping[str, int]) -> tuple[Box, ...]:
    """The regions of the user's tensor that a rank holds; padding is in no box."""
    dims = []
    for (_, segments), size in zip(_dims(layout, mesh, coordinates), layout.shape, strict=True):
        clipped = [_Segment(s.start, s.local, min(s.length, size - s.start)) for s in segments]
        dims.append([s for s in clipped if s.length > 0])
    return tuple(
        Box(tuple(s.start for s in chosen), tuple(s.local for s in chosen), tuple(s.length for s in chosen))
        for chosen in itertools.product(*dims)
    )


def _dims(layout: Layout, mesh: Mapping[str, int], coordinates: Mapping[str, int]) -> Iterator[tuple[int, list[_Segment]]]:
    """For each dim: local length and where its segments come from."""
    for dim, size in enumerate(layout.padded):
        length, segments = size, [_Segment(0, 0, size)]
        for split in layout.splits:
            if split.dim == dim:
                length, segments = _split(segments, length, split, mesh, coordinates)
        yield length, segments


def _split(
    segments: list[_Segment], length: int, split: Split, mesh: Mapping[str, int], coordinates: Mapping[str, int]
) -> tuple[int, list[_Segment]]:
    ranks, rank = 1, 0
    for axis in split.axes:
        size = mesh.get(axis, 1)
        ranks, rank = ranks * size, rank * size + coordinates.get(axis, 0)
    taken: list[_Segment] = []
    position = 0
    for first, last in _intervals(length, rank, ranks, split):
        for s in segments:
            low, high = max(first, s.local), min(last, s.local + s.length)
            if low < high:
                _append(taken, _Segment(s.start + low - s.local, position + low - first, high - low))
        position += last - first
    return position, taken


def _append(segments: list[_Segment], new: _Segment) -> None:
    """Append, or lengthen the last segment where the new one continues it."""
    if segments:
        last = segments[-1]
        if last.start + last.length == new.start and last.local + last.length == new.local:
            segments[-1] = _Segment(last.start, last.local, last.length + new.length)
            return
    segments.append(new)


def _intervals(length: int, rank: int, ranks: int, split: Split) -> Iterator[tuple[int, int]]:
    """What a rank takes of a dim, one interval for each part."""
    if split.uneven:
        chunk = -(-length // ranks)
        yield min(rank * chunk, length), min((rank + 1) * chunk, length)
        return
    parts = _scaled(split.parts, length)
    check_divides(length, ranks, split.dim, parts)
    sizes = parts if isinstance(parts, tuple) else (length // parts,) * parts
    position = 0
    for size in sizes:
        yield position + rank * (size // ranks), position + (rank + 1) * (size // ranks)
        position += size


def _scaled(parts: Parts, length: int) -> Parts:
    """Part sizes are given globally; on a dim that an earlier axis has split they are smaller."""
    if not isinstance(parts, tuple) or sum(parts) == length:
        return parts
    total = sum(parts)
    if any(size * length % total for size in parts):
        raise ShardingError(f"parts {parts} do not fit a dim of size {length}; list the sizes of all parts")
    return tuple(size * length // total for size in parts)


def copy_from_whole(local: Tensor, whole: Tensor, held: tuple[Box, ...]) -> None:
    """Fill a rank's tensor from the user's; padding is left as it is."""
    for box in held:
        box.of_local(local).copy_(box.of_whole(whole))


def all_coordinates(axes: tuple[str, ...], mesh: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Coordinates of all ranks along ``axes``, the last axis fastest."""
    for values in itertools.product(*(range(mesh.get(axis, 1)) for axis in axes)):
        yield dict(zip(axes, values, strict=True))


def largest_numel(layout: Layout, mesh: Mapping[str, int]) -> int:
    """Elements of the largest share, which the first rank holds."""
    return math.prod(local_shape(layout, mesh, {}))


def assemble(stacked: Tensor, layout: Layout, mesh: Mapping[str, int]) -> Tensor:
    """The user's tensor from all shares: ``[*sizes of layout.axes(), largest_numel]``, each flattened and padded at the end."""
    whole = torch.empty(layout.shape, dtype=stacked.dtype, device=stacked.device)
    for coordinates in all_coordinates(layout.axes(), mesh):
        shape = local_shape(layout, mesh, coordinates)
        local = stacked[tuple(coordinates.values())][: math.prod(shape)].view(shape)
        for box in boxes(layout, mesh, coordinates):
            box.of_whole(whole).copy_(box.of_local(local))
    return whole

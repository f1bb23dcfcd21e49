"""Boxes against the operators that cut tensors up: any nesting of axes, strided parts, padding and FSDP2's uneven chunks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hgc.errors import ShardingError
from hgc.ir.ops.layout import Parts, take
from hgc.runtime.shards import Layout, Split, all_coordinates, assemble, boxes, copy_from_whole, largest_numel, local_shape

MESH = {"a": 2, "b": 3}


@dataclass(frozen=True)
class Case:
    layout: Layout


@st.composite
def cases(draw: st.DrawFn) -> Case:
    padded = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    splits = []
    for axis, ranks in MESH.items():
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(padded) - 1))
            parts: Parts = draw(st.integers(1, 2))
            splits.append(Split((axis,), dim, parts))
            padded[dim] *= ranks * (parts if isinstance(parts, int) else 1)
    if len(splits) == 1 and draw(st.booleans()):
        (only,) = splits
        sizes = tuple(MESH[only.axes[0]] * draw(st.integers(0, 3)) for _ in range(3))
        padded[only.dim] = sum(sizes)
        splits = [Split(only.axes, only.dim, sizes)]
    unused = tuple(axis for axis in MESH if all(axis not in split.axes for split in splits))
    if unused and draw(st.booleans()):
        splits.append(Split(unused, 0, uneven=True))
    shape = tuple(draw(st.integers(max(size - 2, 0), size)) for size in padded)
    return Case(Layout(shape, tuple(padded), tuple(splits)))


def cut(whole: Tensor, layout: Layout, coordinates: dict[str, int]) -> Tensor:
    for split in layout.splits:
        ranks = math.prod(MESH[axis] for axis in split.axes)
        rank = 0
        for axis in split.axes:
            rank = rank * MESH[axis] + coordinates[axis]
        if split.uneven:
            chunks = whole.chunk(ranks, split.dim) if whole.size(split.dim) else (whole,)
            whole = chunks[rank] if rank < len(chunks) else whole.narrow(split.dim, 0, 0)
        else:
            whole = take(whole, split.dim, rank, ranks, split.parts)
    return whole


@settings(max_examples=200, deadline=None)
@given(cases())
def test_boxes(case: Case) -> None:
    layout = case.layout
    whole = torch.arange(1.0, 1 + math.prod(layout.shape)).view(layout.shape)
    padded = torch.zeros(layout.padded)
    padded[tuple(slice(size) for size in layout.shape)] = whole
    stacked = torch.zeros(*(MESH[axis] for axis in layout.axes()), largest_numel(layout, MESH))
    for coordinates in all_coordinates(("a", "b"), MESH):
        local = torch.zeros(local_shape(layout, MESH, coordinates))
        copy_from_whole(local, whole, boxes(layout, MESH, coordinates))
        assert torch.equal(local, cut(padded, layout, coordinates))
        stacked[tuple(coordinates[axis] for axis in layout.axes())][: local.numel()] = local.flatten()
    assert torch.equal(assemble(stacked, layout, MESH), whole)


def test_plain_shards_are_one_box() -> None:
    layout = Layout((12, 4), (12, 4), (Split(("a",), 0), Split(("b",), 0)))
    (box,) = boxes(layout, MESH, {"a": 1, "b": 2})
    assert (box.start, box.local, box.size) == ((10, 0), (0, 0), (2, 4))


def test_parts_of_a_dim_that_is_split_already() -> None:
    layout = Layout((24,), (24,), (Split(("a",), 0, (12, 12)), Split(("b",), 0, (12, 12))))
    assert [box.start for box in boxes(layout, MESH, {"a": 1, "b": 0})] == [(6,), (18,)]


def test_scalars() -> None:
    (box,) = boxes(Layout((), ()), MESH, {"a": 0, "b": 0})
    assert box.of_whole(torch.tensor(3.0)).item() == 3.0


def test_sizes_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ShardingError, match="does not divide"):
        boxes(Layout((7,), (7,), (Split(("b",), 0),)), MESH, {"a": 0, "b": 0})

"""Values that pass between unlike meshes: every rank gets what it shall hold, each element once, gradients with their meaning."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc.ir.ops.layout import order_of, take
from hgc.ir.placement import Shard
from hgc.runtime.executor_exchange import Side, exchange, local_shape, side
from hgc.runtime.executor_messages import pack, unpack
from hgc.runtime.executor_volume import volume

SHAPE = (12, 24, 2)
MESHES = ({}, {"dp": 2}, {"tp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"cp": 2, "tp": 3})
POWERS = ({"dp": 8}, {"tp": 8}, {"dp": 2, "tp": 4}, {"dp": 4, "tp": 2}, {"dp": 2, "cp": 2, "tp": 2})
PLACEMENTS = ("S(0)", "S(1)", "I", "R", "S(1,zigzag)", "S(1,2)")


@st.composite
def sides(draw: st.DrawFn) -> Side:
    mesh = draw(st.sampled_from(MESHES))
    return side(draw(st.integers(0, 4)), mesh, {axis: draw(st.sampled_from(PLACEMENTS)) for axis in mesh})


def part(whole: torch.Tensor, where: Side, coordinates: dict[str, int]) -> torch.Tensor:
    for axis, size in where.mesh:
        found = where.parsed().get(axis)
        if isinstance(found, Shard):
            whole = take(whole, found.dim, coordinates[axis], size, order_of(found))
    return whole.contiguous()


def parts(whole: torch.Tensor, where: Side) -> dict[int, torch.Tensor]:
    return {where.first_rank + place: part(whole, where, found) for place, found in enumerate(where.coordinates())}


@settings(max_examples=200, deadline=None)
@given(sides(), sides())
def test_every_rank_gets_its_part_once(source: Side, target: Side) -> None:
    whole = torch.arange(12.0 * 24 * 2).reshape(SHAPE)
    held, wanted = parts(whole, source), parts(whole, target)
    counted = {rank: torch.zeros(local_shape(target, SHAPE)) for rank in wanted}
    got = {rank: torch.full(local_shape(target, SHAPE), -1.0) for rank in wanted}
    for transfer in exchange(source, target, SHAPE):
        packed = pack(held[transfer.source], transfer)
        unpack(packed, transfer, got[transfer.target])
        for _, region in transfer.pieces:
            region.of(counted[transfer.target]).add_(1)
    for rank, expected in wanted.items():
        assert torch.equal(got[rank], expected)
        assert (counted[rank] == 1).all()


def positions(where: Side) -> dict[int, set[int]]:
    """Rank -> the numbers of the elements that it holds, found by cutting a tensor of numbers."""
    return {rank: set(found.flatten().tolist()) for rank, found in parts(torch.arange(12 * 24 * 2).reshape(SHAPE), where).items()}


@settings(max_examples=200, deadline=None)
@given(sides(), sides())
def test_no_exchange_sends_less(source: Side, target: Side) -> None:
    """A rank must get what it shall hold and does not, once: so much arrives, and a rank's own elements stay where they are."""
    held, wanted = positions(source), positions(target)
    arrived = dict.fromkeys(wanted, 0)
    for transfer in exchange(source, target, SHAPE):
        if transfer.source != transfer.target:
            arrived[transfer.target] += transfer.numel
    assert arrived == {rank: len(elements - held.get(rank, set())) for rank, elements in wanted.items()}


@settings(max_examples=200, deadline=None)
@given(sides(), sides(), st.booleans())
def test_volume_counts_what_exchange_sends(source: Side, target: Side, gradient: bool) -> None:
    counted = torch.zeros(source.devices, target.devices, dtype=torch.float64)
    for transfer in exchange(source, target, SHAPE, gradient):
        counted[transfer.source - source.first_rank, transfer.target - target.first_rank] += transfer.numel
    assert torch.equal(volume(source, target, SHAPE, gradient), counted)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(POWERS), st.sampled_from(POWERS), st.data())
def test_replicas_share_the_work(source: dict[str, int], target: dict[str, int], data: st.DataObject) -> None:
    """On the same ranks no rank sends more than twice what it would if all sent alike."""
    chosen = [side(0, mesh, {axis: data.draw(st.sampled_from(("S(0)", "S(1)", "I"))) for axis in mesh}) for mesh in (source, target)]
    sent = volume(*chosen, (8, 8, 1))
    sent.fill_diagonal_(0)
    assert sent.sum(1).max() <= 2 * sent.sum(1).mean()


def test_equal_meshes_exchange_aligned_messages() -> None:
    placements = {"dp": "S(0)", "tp": "I"}
    mesh = {"dp": 2, "tp": 2}
    found = exchange(side(0, mesh, placements), side(4, mesh, placements), SHAPE)
    assert [(t.source, t.target) for t in found] == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert all(len(t.pieces) == 1 for t in found)


def test_replicas_take_turns() -> None:
    found = exchange(side(0, {"tp": 2}, {}), side(2, {"dp": 4}, {"dp": "S(0)"}), SHAPE)
    assert [t.source for t in found] == [0, 1, 0, 1]


def test_a_rank_on_both_sides_keeps_what_it_has() -> None:
    found = exchange(side(0, {"tp": 4}, {}), side(2, {"tp": 2}, {}), SHAPE)
    assert [(t.source, t.target) for t in found] == [(2, 2), (3, 3)]


@pytest.mark.parametrize("readers", [{}, {"dp": 2}, {"dp": 3, "tp": 2}])
def test_a_gradient_reaches_a_sum_over_ranks_once(readers: dict[str, int]) -> None:
    """What is R where it was made has a gradient that the maker's ranks add up: one of them gets it all."""
    maker = side(0, {"dp": 2, "tp": 2}, {"dp": "R", "tp": "I"})
    reader = side(4, readers, {"dp": "S(0)"} if "dp" in readers else {})
    whole = torch.randn(SHAPE)
    held = parts(whole, reader)
    got = {rank: torch.zeros(SHAPE) for rank in range(4)}
    for transfer in exchange(reader, maker, SHAPE, gradient=True):
        unpack(pack(held[transfer.source], transfer), transfer, got[transfer.target])
    assert torch.equal(got[0] + got[2], whole)
    assert torch.equal(got[1] + got[3], whole)

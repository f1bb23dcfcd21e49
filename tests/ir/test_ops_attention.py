"""Attention along sequence axes: the zigzag order, dropped weights, narrow numbers, and what a ring leaves out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.ops import groups
from hgc.ir.ops.layout import Zigzag, join, rank_major, take
from hgc.ir.ops.ring import Chunk, Masking, RingTiles, chunks
from hgc.ir.placement import Shard, parse_placement, zigzag


@settings(deadline=None, max_examples=30)
@given(runs=st.integers(1, 3), ranks=st.integers(1, 4), chunk=st.integers(1, 3), dim=st.integers(0, 2))
def test_zigzag_parts_are_taken_and_joined(runs: int, ranks: int, chunk: int, dim: int) -> None:
    shape = [2, 3, 2]
    shape[dim] = runs * 2 * ranks * chunk
    x = torch.arange(torch.Size(shape).numel()).view(shape)
    order = Zigzag(runs)
    parts = [take(x, dim, rank, ranks, order) for rank in range(ranks)]
    assert torch.equal(join(torch.stack(parts), dim, order), x)
    assert torch.equal(rank_major(x, dim, ranks, order), torch.stack(parts))


def test_a_rank_holds_an_early_and_a_late_chunk() -> None:
    assert [take(torch.arange(8), 0, rank, 2, Zigzag()).tolist() for rank in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert take(torch.arange(16), 0, 1, 2, Zigzag(2)).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert chunks(1, 2, 4, zigzag=True) == (Chunk(2, 0, 2), Chunk(4, 2, 2))
    with pytest.raises(ShardingError, match=r"size 6 does not divide into 4 chunks .* pad it to a multiple of 4"):
        take(torch.arange(6), 0, 0, 2, Zigzag())


def test_zigzag_has_a_text() -> None:
    for shard in (Shard(1, zigzag(1)), Shard(0, zigzag(4))):
        assert parse_placement(str(shard)) == shard
    assert str(Shard(1, zigzag(1))) == "S(1,zigzag)"


def tensors(dtype: torch.dtype, length: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, length, 4, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    return [x.to(dtype) for x in (q, k, v)]


def on_ring(ranks: int, inputs: list[Tensor], use: Callable[[Tensor, Tensor, Tensor], Tensor]) -> list[tuple[Tensor, list[Tensor]]]:
    """Result and gradients (of the sum of squares) of each rank, inputs in zigzag order."""

    def rank_main(rank: int) -> tuple[Tensor, list[Tensor]]:
        own = [take(x, 2, rank, ranks, Zigzag()).requires_grad_() for x in inputs]
        with ops.use(mesh_groups({"cp": ranks})):
            out = use(*own)
            return out.detach(), list(torch.autograd.grad(out.square().sum(), own))

    return run_ranks(ranks, rank_main)


def test_gradients_belong_to_the_weights_that_were_dropped() -> None:
    """A step along the gradient changes the loss by what the gradient says, for the same random numbers."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, causal=True, dropout=0.4, random_axes=("cp",), ring_axis="cp", zigzag=True)

    inputs = tensors(torch.float64)
    results = on_ring(2, inputs, attend)
    gradients = [join(torch.stack([r[1][i] for r in results]), 2, Zigzag()) for i in range(3)]
    slope = sum(float(g.square().sum()) for g in gradients)

    def loss(step: float) -> float:
        moved = [x + step * g for x, g in zip(inputs, gradients, strict=True)]
        return sum(float(out.square().sum()) for out, _ in on_ring(2, moved, attend))

    assert (loss(1e-6) - loss(-1e-6)) / 2e-6 == pytest.approx(slope, rel=1e-6)


def test_dropped_weights_differ_between_ranks_and_steps() -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def one() -> Tensor:
            return ops.attention(torch.zeros_like(q), k, torch.ones_like(v), dropout=0.5, random_axes=("cp",), ring_axis="cp", zigzag=True)

        return torch.stack([one() + 0 * (q.sum() + k.sum() + v.sum()), one()])

    first, second = (out for out, _ in on_ring(2, tensors(torch.float64), attend))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0])
    assert first.mean() == pytest.approx(1.0, abs=0.15)


def test_bfloat16_is_summed_in_float32() -> None:
    """As close to the exact result as one device is."""
    inputs = tensors(torch.bfloat16, 64)
    exact = ops.attention(*(x.double() for x in inputs), causal=True)
    single = ops.attention(*inputs, causal=True)
    results = on_ring(4, inputs, lambda q, k, v: ops.attention(q, k, v, causal=True, ring_axis="cp", zigzag=True))
    found = join(torch.stack([out for out, _ in results]), 2, Zigzag())
    assert found.dtype == torch.bfloat16
    assert (found.double() - exact).abs().max() <= 1.5 * (single.double() - exact).abs().max()


@pytest.mark.parametrize(("in_zigzag", "work"), [(True, [9, 9, 9, 9]), (False, [4, 8, 12, 16])])
def test_causal_ranks_do_equal_work_in_zigzag_order(in_zigzag: bool, work: list[int]) -> None:
    """Scores that a rank computes, out of 16 for each pair of ranks' shares: tiles above the diagonal are left out."""
    masking = Masking(causal=True, window=0, scale=1.0, softcap=0.0, dropout=0.0, seed=0, zigzag=in_zigzag)
    q, k, v = (x[:, :, :2] for x in tensors(torch.float64))
    found = []
    for rank in range(4):
        ring = RingTiles(q, None, masking, groups.Group("cp", 4, rank, None))  # type: ignore[arg-type]
        found.append(sum(rows.length * columns.length for source in range(4) for rows, columns, _ in ring.at(source, k, v)))
    assert found == work

"""Every collective against its single-process meaning: the global value never changes, and neither does the global gradient."""

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
from hgc.ir.ops.layout import Parts, join, rank_major, take
from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard

Op = Callable[[Tensor], Tensor]


def summands(x: Tensor, ranks: int, seed: int) -> list[Tensor]:
    """Random tensors that add up to ``x``; integers times 1/8, so that sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    parts = [torch.randint(-8, 8, x.shape, generator=generator).to(x.dtype) / 8 for _ in range(ranks - 1)]
    return [*parts, x - sum(parts, torch.zeros_like(x))]


def spread(x: Tensor, placement: Placement, ranks: int, seed: int = 0) -> list[Tensor]:
    if isinstance(placement, Shard):
        assert not hasattr(placement.parts, "free_symbols")
        return [take(x, placement.dim, rank, ranks, placement.parts).contiguous() for rank in range(ranks)]
    return summands(x, ranks, seed) if isinstance(placement, Partial) else [x.clone() for _ in range(ranks)]


def gathered(locals_: list[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Shard):
        return join(torch.stack(locals_), placement.dim, placement.parts)
    if isinstance(placement, Partial):
        return torch.stack(locals_).sum(0)
    assert all(torch.equal(locals_[0], other) for other in locals_)
    return locals_[0]


def cotangent(placement: Placement) -> Placement:
    """Where the gradient lives, as a value: sums and equal copies change places."""
    return {Partial(): Invariant(), Replicated(): Partial()}.get(placement, placement)


def check(op: Op, source: Placement, target: Placement, shape: tuple[int, ...], ranks: int) -> None:
    generator = torch.Generator().manual_seed(1)
    value = torch.randint(-8, 8, shape, generator=generator).double() / 8
    grad = torch.randint(-8, 8, shape, generator=generator).double() / 8
    inputs, grads = spread(value, source, ranks, 2), spread(grad, cotangent(target), ranks, 3)

    def rank_main(rank: int) -> tuple[Tensor, Tensor, Tensor]:
        with ops.use(mesh_groups({"ax": ranks})):
            x = inputs[rank].requires_grad_()
            y = op(x)
            y.backward(grads[rank])
            assert x.grad is not None
            return y.detach(), x.grad, op(inputs[rank].detach())

    outs, in_grads, without_grad = zip(*run_ranks(ranks, rank_main), strict=True)
    assert torch.equal(gathered(list(outs), target), value)
    assert torch.equal(gathered(list(in_grads), cotangent(source)), grad)
    assert all(map(torch.equal, outs, without_grad))


PLAIN: list[tuple[str, Op, Placement, Placement]] = [
    ("copy_in", lambda x: ops.copy_in(x, "ax"), Invariant(), Replicated()),
    ("as_invariant", lambda x: ops.as_invariant(x, "ax"), Replicated(), Invariant()),
    ("as_partial", lambda x: ops.as_partial(x, "ax"), Invariant(), Partial()),
    ("all_reduce", lambda x: ops.all_reduce(x, "ax"), Partial(), Invariant()),
    ("all_reduce_r", lambda x: ops.all_reduce_r(x, "ax"), Partial(), Replicated()),
]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("op", "source", "target"), [case[1:] for case in PLAIN], ids=[case[0] for case in PLAIN])
def test_sums_and_copies(op: Op, source: Placement, target: Placement, ranks: int) -> None:
    check(op, source, target, (3, 4), ranks)


@st.composite
def sharded_dims(draw: st.DrawFn) -> tuple[int, tuple[int, ...], int, Parts]:
    """Ranks, global shape, dim and parts that divide."""
    ranks = draw(st.integers(2, 4))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    parts: Parts = draw(st.one_of(st.integers(1, 3), st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple)))
    if isinstance(parts, tuple):
        parts = tuple(size * ranks for size in parts)
        shape[dim] = sum(parts)
    else:
        shape[dim] *= ranks * parts
    return ranks, tuple(shape), dim, parts


@settings(max_examples=40, deadline=None)
@given(sharded_dims(), st.sampled_from(["all_gather", "all_gather_i", "shard", "shard_r"]))
def test_strided_shards(case: tuple[int, tuple[int, ...], int, Parts], name: str) -> None:
    ranks, shape, dim, parts = case
    whole: Placement = Replicated() if name in ("all_gather", "shard_r") else Invariant()
    source, target = (Shard(dim, parts), whole) if "gather" in name else (whole, Shard(dim, parts))
    check(lambda x: getattr(ops, name)(x, dim, "ax", parts), source, target, shape, ranks)


@settings(max_examples=20, deadline=None)
@given(st.integers(2, 4), st.permutations([0, 1, 2]), st.tuples(*[st.integers(1, 3)] * 3))
def test_plain_shards(ranks: int, dims: list[int], shape: tuple[int, ...]) -> None:
    src, dst, _ = dims
    sizes = tuple(size * ranks if dim in (src, dst) else size for dim, size in enumerate(shape))
    check(lambda x: ops.reduce_scatter(x, src, "ax"), Partial(), Shard(src), sizes, ranks)
    check(lambda x: ops.all_to_all(x, src, dst, "ax"), Shard(src), Shard(dst), sizes, ranks)


@settings(max_examples=100, deadline=None)
@given(sharded_dims())
def test_layout_round_trip(case: tuple[int, tuple[int, ...], int, Parts]) -> None:
    ranks, shape, dim, parts = case
    x = torch.randn(shape)
    shards = rank_major(x, dim, ranks, parts)
    assert torch.equal(join(shards, dim, parts), x)
    assert all(torch.equal(shards[rank], take(x, dim, rank, ranks, parts)) for rank in range(ranks))


@pytest.mark.parametrize(("length", "parts"), [(6, 1), (8, 4), (12, (6, 6)), (12, (4, 4))])
def test_sizes_that_do_not_divide_are_refused(length: int, parts: Parts) -> None:
    with pytest.raises(ShardingError, match="dim 1"):
        take(torch.zeros(2, length), 1, 0, 4, parts)


def test_integers_pass_without_autograd() -> None:
    def rank_main(rank: int) -> Tensor:
        with ops.use(mesh_groups({"ax": 2})):
            return ops.all_gather(torch.tensor([rank]), 0, "ax")

    assert all(out.tolist() == [0, 1] for out in run_ranks(2, rank_main))


def test_single_device_self() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    for name in ("copy_in", "as_invariant", "all_reduce", "all_reduce_r"):
        assert getattr(ops, name)(x, "tp") is x
    for name in ("all_gather", "all_gather_i", "reduce_scatter", "shard", "shard_r"):
        assert getattr(ops, name)(x, 0, "tp") is x
    assert ops.all_to_all(x, 0, 1, "tp") is x


def test_backward_keeps_the_group_of_forward() -> None:
    def rank_main(rank: int) -> Tensor:
        groups = mesh_groups({"dp": 2, "tp": 2})
        x = torch.full((1,), float(rank), requires_grad=True)
        with ops.use({"tp": groups["tp"]}):
            y = ops.copy_in(x, "tp")
        with ops.use({"tp": groups["dp"]}):
            y.backward(torch.full((1,), float(rank)))
        assert x.grad is not None
        return x.grad

    assert [grad.item() for grad in run_ranks(4, rank_main)] == [1.0, 1.0, 5.0, 5.0]


def test_a_failing_rank_is_reported() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            raise ValueError("rank one is ill")
        with ops.use(mesh_groups({"ax": 3})):
            ops.all_reduce(torch.ones(1), "ax")

    with pytest.raises(ValueError, match="rank one is ill"):
        run_ranks(3, rank_main)

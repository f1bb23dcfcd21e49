"""Gradient sums: what each rank ends up with, whatever was used, frozen, tied or accumulated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgc.backends.parity.threads import run_ranks
from hgc.ir.ops.groups import describe
from hgc.runtime.reducer import Reducer

RANKS = 3


def reducer_of(*parameters: nn.Parameter, bucket_bytes: int = 1) -> Reducer:
    assert isinstance(dist.group.WORLD, dist.ProcessGroup)
    group = describe(dist.group.WORLD)
    return Reducer([(parameter, group) for parameter in parameters], bucket_bytes)


def step(reducer: Reducer, *losses: Callable[[], Tensor]) -> None:
    """One step of several micro-batches."""
    reducer.begin_step()
    for index, loss in enumerate(losses):
        if index == len(losses) - 1:
            reducer.begin()
        loss().backward()
    reducer.finish()


def parameters(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size)) for size in sizes]


@pytest.mark.parametrize("bucket_bytes", [1, 20, 10**6])
def test_sum_not_mean(bucket_bytes: int) -> None:
    def rank_main(rank: int) -> list[float]:
        given = parameters(3, 2, 4)
        reducer = reducer_of(*given, bucket_bytes=bucket_bytes)
        for _ in range(2):
            for parameter in given:
                parameter.grad = None
            step(reducer, lambda: sum((p * (rank + 1) * k).sum() for k, p in enumerate(given, 1)))  # type: ignore[arg-type, return-value]
        return [p.grad.unique().item() for p in given if p.grad is not None]

    assert run_ranks(RANKS, rank_main) == [[6.0, 12.0, 18.0]] * RANKS


@pytest.mark.parametrize("bucket_bytes", [1, 10**6])
def test_unused_parameters(bucket_bytes: int) -> None:
    """Unused everywhere: no gradient. Unused on some ranks: the sum of the others, on all."""

    def rank_main(rank: int) -> list[float | None]:
        used, sometimes, _ = given = parameters(3, 2, 4)
        reducer = reducer_of(*given, bucket_bytes=bucket_bytes)
        step(reducer, lambda: used.sum() + (sometimes.sum() * 5 if rank == 1 else 0))
        return [None if p.grad is None else p.grad.unique().item() for p in given]

    assert run_ranks(RANKS, rank_main) == [[3.0, 5.0, None]] * RANKS


def test_micro_batches_sum_once() -> None:
    def rank_main(rank: int) -> float:
        (p,) = parameters(3)
        step(reducer_of(p), lambda: p.sum() * rank, lambda: p.sum() * 10)
        assert p.grad is not None
        return p.grad.unique().item()

    assert run_ranks(RANKS, rank_main) == [33.0] * RANKS


def test_gradients_of_earlier_steps_are_added_to() -> None:
    """As in torch when ``zero_grad`` is left out; summed gradients must not be summed again."""

    def rank_main(rank: int) -> list[float]:
        p, q = parameters(3, 3)
        reducer = reducer_of(p, q, bucket_bytes=10**6)
        step(reducer, lambda: p.sum() + q.sum())
        step(reducer, lambda: p.sum())
        return [g.grad.unique().item() for g in (p, q) if g.grad is not None]

    assert run_ranks(RANKS, rank_main) == [[6.0, 3.0]] * RANKS


def test_frozen_and_unfrozen_between_steps() -> None:
    def rank_main(rank: int) -> list[float | None]:
        p, q = parameters(3, 3)
        q.requires_grad_(False)
        reducer = reducer_of(p, q)
        found: list[float | None] = []
        for frozen in (True, False, True):
            q.requires_grad_(not frozen)
            p.grad = q.grad = None
            step(reducer, lambda: p.sum() + q.sum())
            found += [None if g.grad is None else g.grad.unique().item() for g in (p, q)]
        return found

    assert run_ranks(RANKS, rank_main) == [[3.0, None, 3.0, 3.0, 3.0, None]] * RANKS


def test_tied_parameter_is_summed_once() -> None:
    def rank_main(rank: int) -> float:
        p, q = parameters(3, 3)
        step(reducer_of(p, q), lambda: (p * q).sum() + (p * 2).sum())
        assert p.grad is not None
        return p.grad.unique().item()

    assert run_ranks(RANKS, rank_main) == [9.0] * RANKS


def test_second_gradient_after_its_sum_is_an_error() -> None:
    def rank_main(rank: int) -> None:
        (p,) = parameters(3)
        reducer = reducer_of(p)
        reducer.begin_step()
        reducer.begin()
        p.sum().backward()
        p.sum().backward()

    with pytest.raises(RuntimeError, match="second gradient"):
        run_ranks(RANKS, rank_main)


def test_buckets_start_in_one_order_on_all_ranks() -> None:
    """Ranks use their parameters in different orders; a threaded group would mix sums up or hang."""

    def rank_main(rank: int) -> list[float]:
        given = parameters(3, 3, 3)
        order = given[rank:] + given[:rank]

        def loss() -> Tensor:
            x = torch.ones(())
            for parameter in order:
                x = x * parameter.sum() / 3
            return x

        step(reducer_of(*given), loss)
        return [round(p.grad.unique().item(), 4) for p in given if p.grad is not None]

    assert run_ranks(RANKS, rank_main) == [[1.0, 1.0, 1.0]] * RANKS

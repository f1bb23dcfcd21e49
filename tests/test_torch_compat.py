"""Each private torch interface does what hgc relies on; a failure here names what a new torch release has changed."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hgc import _torch_compat as compat
from tests.distributed.threads import run_ranks


def on_world(use: object) -> list[Tensor]:
    def rank_main(rank: int) -> Tensor:
        assert isinstance(dist.group.WORLD, dist.ProcessGroup)
        return use(torch.arange(4.0) + 10 * rank, str(dist.group.WORLD.group_name))  # type: ignore[operator, no-any-return]

    return run_ranks(2, rank_main)


def test_all_reduce() -> None:
    assert on_world(lambda x, name: compat.all_reduce(x, "sum", name))[1].tolist() == [10.0, 12.0, 14.0, 16.0]
    assert on_world(lambda x, name: compat.all_reduce(x, "max", name))[0].tolist() == [10.0, 11.0, 12.0, 13.0]


def test_all_reduce_leaves_its_input_alone() -> None:
    def use(x: Tensor, name: str) -> Tensor:
        compat.all_reduce(x, "sum", name)
        return x

    assert on_world(use)[0].tolist() == [0.0, 1.0, 2.0, 3.0]


def test_gathers_and_scatters_keep_rank_order() -> None:
    assert on_world(lambda x, name: compat.all_gather_flat(x[:2], 2, name))[0].tolist() == [0.0, 1.0, 10.0, 11.0]
    assert [x.tolist() for x in on_world(lambda x, name: compat.reduce_scatter_flat(x, 2, name))] == [[10.0, 12.0], [14.0, 16.0]]
    exchanged = on_world(lambda x, name: compat.all_to_all_flat(x, 2, name))
    assert [x.tolist() for x in exchanged] == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]


def test_threads_are_ranks_of_separate_worlds() -> None:
    assert run_ranks(3, lambda rank: (dist.get_rank(), dist.get_world_size())) == [(0, 3), (1, 3), (2, 3)]
    assert not dist.is_initialized()


def test_abort_frees_ranks_that_wait() -> None:
    def rank_main(rank: int) -> None:
        if rank == 1:
            raise ValueError("ill")
        dist.barrier()

    with pytest.raises(ValueError, match="ill"):
        run_ranks(2, rank_main)
    assert not any("rank_main" in thread.name for thread in threading.enumerate())


def test_local_store() -> None:
    store = compat.local_store()
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_copy_all() -> None:
    targets = [torch.zeros(3), torch.zeros(2, 2)]
    compat.copy_all(targets, [torch.ones(3), torch.full((2, 2), 2.0)])
    compat.copy_all([], [])
    assert [target.unique().item() for target in targets] == [1.0, 2.0]

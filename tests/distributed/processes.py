"""Ranks as real processes on gloo, for what threads cannot show: FSDP2, asynchronous collectives, torch.compile."""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Result = TypeVar("Result")


def _rank_main(rank: int, world: int, folder: str, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    try:
        Path(folder, f"{rank}.pkl").write_bytes(pickle.dumps(fn(rank, *args)))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_processes(world: int, fn: Callable[..., Result], *args: Any) -> list[Result]:
    """Run ``fn(rank, *args)`` in ``world`` processes that form a gloo group; returns the results in rank order.

    ``fn`` must be importable (a module-level function); the first exception of a rank is raised here.
    """
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank_main, (world, folder, fn, args), nprocs=world)  # type: ignore[no-untyped-call]
        return [pickle.loads(Path(folder, f"{rank}.pkl").read_bytes()) for rank in range(world)]

"""What FSDP2 does on the host for each gather and scatter of a unit: hooks and bookkeeping, beside the copies and the collective."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hgc._torch_compat import all_gather_flat, reduce_scatter_flat

UNITS, WIDTH = 6, 8
MOVES = 3
"""Of a unit in a step: gathered for forward, gathered for backward, its gradients scattered."""
STEPS = 12


def unit_s(per_node: int) -> float:
    """Seconds for each gather or scatter, where ``per_node`` ranks share the cores of a machine; the mean of all ranks.

    The processor's time of a chain of tiny layers, each a unit, beyond that of the same chain whole and of bare collectives.
    """
    ranks = dist.get_world_size()
    if ranks == 1:
        return 0.0
    sharded = _cpu_s(_chain(init_device_mesh("cpu", (ranks,)))) / (UNITS * MOVES)
    whole = _cpu_s(_chain(None)) / (UNITS * MOVES)
    beyond = torch.tensor(max(0.0, sharded - whole - _cpu_s(_bare(ranks)) / MOVES), dtype=torch.float64)
    dist.all_reduce(beyond)
    return float(beyond) / ranks * max(1.0, per_node / len(os.sched_getaffinity(0)))


def _cpu_s(call: Callable[[], None]) -> float:
    """Of this thread; the median call."""
    taken = []
    for _ in range(STEPS):
        start = time.thread_time()
        call()
        taken.append(time.thread_time() - start)
    return statistics.median(taken[2:])


def _chain(mesh: DeviceMesh | None) -> Callable[[], None]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(UNITS)))
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    x = torch.ones(WIDTH, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step


def _bare(ranks: int) -> Callable[[], None]:
    world = dist.group.WORLD
    assert world is not None
    name = world.group_name
    part, whole = torch.zeros(WIDTH), torch.zeros(ranks * WIDTH)

    def moves() -> None:
        all_gather_flat(part, ranks, name)
        all_gather_flat(part, ranks, name)
        reduce_scatter_flat(whole, ranks, name)

    return moves

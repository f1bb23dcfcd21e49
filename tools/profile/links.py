"""How long collectives take among ranks of one node, and across nodes, over message sizes; as emitted programs call them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from hgc._torch_compat import all_gather_flat, all_to_all_flat, reduce_scatter_flat
from hgc.tools.calibration.points import Sweep
from hgc.tools.profile.clock import seconds
from hgc.tools.profile.cold import in_turn, sets

SIZES = tuple(2**power for power in (10, 14, 17, 20, 22, 24))
GPU_SIZES = (2**10, 2**13, 2**16, 2**18, 2**20, 2**22, 2**25, 2**28)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
BETWEEN = 384
"""Rows and columns of the product that a CPU computes in front of each collective; docs/design/profile.md says why so many."""
LEAST = 0.02
"""Share of the product below which a difference is noise."""


def sweeps(device: torch.device, group: dist.ProcessGroup, nodes: int, per_node: int) -> list[Sweep]:
    """Every collective over message sizes among the ranks of this rank's ``group``, all groups at once; sizes as nccl-tests counts them.
    The group spans ``nodes``, on each of which ``per_node`` ranks are busy in this and other groups.

    Processes that share cores are not at a collective together, and those that wait take cores from those that still compute. So on a
    CPU each collective follows a product, as in a program, and what products take alone is taken off.
    """
    sizes = GPU_SIZES if device.type == "cuda" else SIZES
    ranks = dist.get_world_size(group)
    before = _Before(device)
    found = []
    for name in COLLECTIVES:
        taken = [before.beyond(_call(name, size, device, group), device) for size in sizes]
        found.append(Sweep(name, "", ranks, nodes, "", "", "measured", np.array(sizes, dtype=np.float64), np.array(taken), per_node))
    return found


class _Before:
    """What a device computes in front of each collective: on a CPU a product, on a GPU nothing."""

    def __init__(self, device: torch.device) -> None:
        square = (BETWEEN, BETWEEN)
        self._pairs = [(torch.randn(square), torch.randn(square)) for _ in sets(device, 12 * BETWEEN**2)] if device.type == "cpu" else []
        self._call = in_turn([partial(torch.mm, *pair) for pair in self._pairs])
        self._alone_s = seconds(self._call, device, together=False) if self._pairs else 0.0

    def beyond(self, collective: Callable[[], None], device: torch.device) -> float:
        """Seconds that a collective takes beyond the product, at least those of the product's own noise."""
        if not self._pairs:
            return seconds(collective, device, together=True)

        def both() -> None:
            self._call()
            collective()

        return max(seconds(both, device, together=True) - self._alone_s, LEAST * self._alone_s)


def _call(name: str, size_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], None]:
    return in_turn([_one(name, size_bytes, device, group) for _ in sets(device, 2 * size_bytes)])


def _one(name: str, size_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(size_bytes // 4 // ranks * ranks, device=device)
    label = group.group_name
    if name == "all_reduce":
        return lambda: _sum(whole, group)
    if name == "all_gather":
        part = torch.zeros(len(whole) // ranks, device=device)
        return lambda: all_gather_flat(part, ranks, label)
    if name == "reduce_scatter":
        return lambda: reduce_scatter_flat(whole, ranks, label)
    if name == "all_to_all":
        return lambda: all_to_all_flat(whole, ranks, label)
    return lambda: _pass_on(rank, ranks, whole, torch.empty_like(whole), group)


def _sum(bucket: Tensor, group: dist.ProcessGroup) -> Tensor:
    """In place, as gradients are summed."""
    dist.all_reduce(bucket, group=group)
    return bucket


def _pass_on(rank: int, ranks: int, sent: Tensor, received: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Pairs exchange a message, the one with the lower rank first: two messages, one after the other, timed as their mean."""
    partner = rank ^ 1
    if partner < ranks:
        work = dist.irecv(received, group=group, group_src=partner)
        assert work is not None
        dist.send(sent, group=group, group_dst=partner)
        work.wait()
    return received

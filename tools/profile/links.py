"""How long collectives take among ranks of one node, and across nodes, over message sizes; as emitted programs call them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

from hgc._torch_compat import all_gather_flat, all_reduce, all_to_all_flat, reduce_scatter_flat
from hgc.tools.calibration.points import Sweep
from hgc.tools.profile.clock import seconds

SIZES = tuple(2**power for power in (10, 13, 16, 18, 20, 22))
GPU_SIZES = (*SIZES, 2**25, 2**28)
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")


def sweeps(device: torch.device, group: dist.ProcessGroup, nodes: int) -> list[Sweep]:
    """Every collective over message sizes among the ranks of this rank's ``group``, all groups at once; sizes as nccl-tests counts them."""
    sizes = GPU_SIZES if device.type == "cuda" else SIZES
    ranks = dist.get_world_size(group)
    found = []
    for name in COLLECTIVES:
        taken = [seconds(_call(name, size, device, group), device, together=True) for size in sizes]
        found.append(Sweep(name, "", ranks, nodes, "", "", "measured", np.array(sizes, dtype=np.float64), np.array(taken)))
    return found


def _call(name: str, size_bytes: int, device: torch.device, group: dist.ProcessGroup) -> Callable[[], object]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(size_bytes // 4 // ranks * ranks, device=device)
    part = torch.zeros(len(whole) // ranks, device=device)
    other = torch.zeros_like(whole)
    label = group.group_name
    if name == "all_reduce":
        return lambda: all_reduce(whole, "sum", label)
    if name == "all_gather":
        return lambda: all_gather_flat(part, ranks, label)
    if name == "reduce_scatter":
        return lambda: reduce_scatter_flat(whole, ranks, label)
    if name == "all_to_all":
        return lambda: all_to_all_flat(whole, ranks, label)
    return lambda: _pass_on(rank, ranks, whole, other, group)


def _pass_on(rank: int, ranks: int, sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Pairs exchange a message, the one with the lower rank first: two messages, one after the other, timed as their mean."""
    partner = rank ^ 1
    if partner >= ranks:
        return
    work = dist.irecv(received, group=group, group_src=partner)
    assert work is not None
    dist.send(sent, group=group, group_dst=partner)
    work.wait()

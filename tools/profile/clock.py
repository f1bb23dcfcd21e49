"""Timing on all ranks at once, so that what ranks share (cores, memory, links) is shared while it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 5
"""The median of so many runs counts."""
LONG_ENOUGH_S = 0.02
"""Calls are repeated until one run takes this long."""
MOST_CALLS = 1000


def seconds(call: Callable[[], object], device: torch.device, together: bool) -> float:
    """Time of one call, all ranks starting at once: the slowest rank's if they work ``together``, else their mean; the median over runs."""
    call()
    calls = _calls(call, device)
    runs = sorted(_run(call, device, calls) for _ in range(REPEATS))
    return agreed(runs[REPEATS // 2], together)


def agreed(value: float, largest: bool) -> float:
    """The largest of all ranks' values, or their mean; the same on every rank."""
    found = torch.tensor(value, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        found = found.cuda()
    dist.all_reduce(found, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return float(found) / (1 if largest else dist.get_world_size())


def _calls(call: Callable[[], object], device: torch.device) -> int:
    once = agreed(_run(call, device, 1), largest=True)
    return max(1, min(MOST_CALLS, round(LONG_ENOUGH_S / max(once, 1e-9))))


def _run(call: Callable[[], object], device: torch.device, calls: int) -> float:
    dist.barrier()
    _settle(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    _settle(device)
    return (time.perf_counter() - start) / calls


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

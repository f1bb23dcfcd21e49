"""Timing on all ranks at once, so that what ranks share (cores, memory, links) is shared while it is measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

REPEATS = 3
"""The median of so many runs counts."""
LONG_ENOUGH_S = 0.04
"""A run has as many calls as take this long: several times what a scheduler lets one of several processes on a core run alone."""
LEAD = 0.3
"""Share of a run's calls that each rank makes before and after the timed ones, so that the others are at work while it is timed."""
MOST_CALLS = 2**16


def seconds(call: Callable[[], object], device: torch.device, together: bool) -> float:
    """Time of one call while all ranks do the same: the slowest rank's if they work ``together``, else their mean; the median over runs."""
    calls = 1
    taken = agreed(_run(call, device, calls), together)
    while taken * calls < LONG_ENOUGH_S and calls < MOST_CALLS:
        wanted = math.ceil(LONG_ENOUGH_S / max(taken, 1e-9))
        calls = min(MOST_CALLS, max(2 * calls, min(wanted, 8 * calls)))
        taken = agreed(_run(call, device, calls), together)
    runs = sorted([taken, *(agreed(_run(call, device, calls), together) for _ in range(REPEATS - 1))])
    return runs[REPEATS // 2]


def agreed(value: float, largest: bool) -> float:
    """The largest of all ranks' values, or their mean; the same on every rank."""
    found = torch.tensor(value, dtype=torch.float64)
    if dist.get_backend() == "nccl":
        found = found.cuda()
    dist.all_reduce(found, dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM)
    return float(found) / (1 if largest else dist.get_world_size())


def _run(call: Callable[[], object], device: torch.device, calls: int) -> float:
    dist.barrier()
    around = round(LEAD * calls)
    _repeat(call, around)
    _settle(device)
    start = time.perf_counter()
    _repeat(call, calls)
    _settle(device)
    taken_s = (time.perf_counter() - start) / calls
    _repeat(call, around)
    _settle(device)
    return taken_s


def _repeat(call: Callable[[], object], calls: int) -> None:
    for _ in range(calls):
        call()


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

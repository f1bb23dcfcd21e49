"""Moments of a running program: of its device where that works on its own, else of this process."""

from __future__ import annotations

import time
from typing import Any, Protocol

import torch
import torch.distributed as dist

Moment = Any
"""What :meth:`Clock.now` gives; only its clock can read it."""


class Clock(Protocol):
    """``serial``: what one group sends goes one after the other, whatever was started first; ``on_compute_stream``: see below."""

    serial: bool

    def now(self) -> Moment:
        """The moment at which what was asked of the device so far is done; does not wait for it."""
        ...

    def on_compute_stream(self) -> bool:
        """Is what is asked of the device now ordered with its computation?"""
        ...

    def seconds(self, moment: Moment) -> float:
        """Since the clock was made; only after :meth:`settle`."""
        ...

    def settle(self) -> None:
        """Wait until all that was asked of the device is done."""
        ...


class HostClock:
    """A CPU does what it is asked at once; gloo works on two messages of a group at a time."""

    serial = False

    def __init__(self) -> None:
        dist.barrier()  # ranks start to count together
        self._zero_s = time.perf_counter()

    def now(self) -> Moment:
        return time.perf_counter()

    def on_compute_stream(self) -> bool:
        return True

    def seconds(self, moment: Moment) -> float:
        return float(moment) - self._zero_s

    def settle(self) -> None:
        return None


class CudaClock:
    """Events on the current stream, so that nothing waits for the device while it is watched."""

    serial = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._compute = torch.cuda.current_stream(device)
        dist.barrier()
        self.settle()
        self._zero = self.now()

    def now(self) -> Moment:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def on_compute_stream(self) -> bool:
        return bool(torch.cuda.current_stream(self._device) == self._compute)

    def seconds(self, moment: Moment) -> float:
        return float(self._zero.elapsed_time(moment)) / 1e3

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)


def clock_of(device: torch.device) -> Clock:
    """The device's clock; all ranks must make it at the same time."""
    return CudaClock(device) if device.type == "cuda" else HostClock()

"""Paired timings of two programs to a ratio and its spread."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Pairs:
    """What alternating steps of the emitted program and its baseline took; entry i of every list belongs to pair i.

    ``*_s`` is the time from a barrier before the step to one behind it, ``*_cpu_s`` the processor time of all ranks together.
    ``loss_difference`` is the largest relative difference of the two losses over all steps, warm-up included.
    """

    emitted_s: tuple[float, ...]
    baseline_s: tuple[float, ...]
    emitted_cpu_s: tuple[float, ...]
    baseline_cpu_s: tuple[float, ...]
    loss_difference: float


@dataclass(frozen=True)
class Ratio:
    """Median of per-pair ratios with its quartiles."""

    median: float
    low: float
    high: float


def ratio(emitted: Sequence[float], baseline: Sequence[float]) -> Ratio:
    """Ratios pair by pair, so that a slow spell of a shared machine hits both sides; needs at least two pairs."""
    values = [a / b for a, b in zip(emitted, baseline, strict=True)]
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Ratio(median, low, high)

"""A batch cut into micro-batches of similar lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import numpy as np

from hgc.passes.sequence.bound import Demand, least_deadline
from hgc.passes.sequence.costs import Fleet, Numbers, Rates

SHIFTS = (0.16, 0.08, 0.04, 0.02)
"""By what part of a micro-batch's tokens borders are tried to move."""
PIECES, STEPS, MIXES = 48, 16, (1.0, 0.6, 0.3)
"""Of an estimate: lengths taken together, halvings of the interval, shares of work in the need that are looked at."""


def even_borders(lengths: Numbers, micro_batches: int) -> list[int] | None:
    """Borders of consecutive micro-batches with the least largest sum of tokens, first 0 and last ``len(lengths)`` (FlexSP, section 5.2).

    Found by bisection on the sum instead of the paper's dynamic programme; whole tokens make it exact. ``None`` if there are fewer
    sequences than micro-batches.
    """
    if micro_batches > len(lengths):
        return None
    sums = np.concatenate([[0.0], np.cumsum(lengths)])
    low, high = float(lengths.max()), float(sums[-1])
    low = max(low, math.ceil(high / micro_batches))
    while low < high:
        middle = (low + high) // 2
        if len(_greedy(sums, middle)) - 1 <= micro_batches:
            high = middle
        else:
            low = middle + 1
    return _split(_greedy(sums, high), micro_batches)


def _greedy(sums: Numbers, most: float) -> list[int]:
    borders = [0]
    while borders[-1] < len(sums) - 1:
        borders.append(int(np.searchsorted(sums, sums[borders[-1]] + most, side="right")) - 1)
    return borders


def _split(borders: list[int], micro_batches: int) -> list[int]:
    """Cut the micro-batches with most sequences until there are enough of them."""
    while len(borders) - 1 < micro_batches:
        at = max(range(len(borders) - 1), key=lambda i: borders[i + 1] - borders[i])
        borders.insert(at + 1, (borders[at] + borders[at + 1]) // 2)
    return borders


def better_borders(lengths: Numbers, borders: list[int], rates: Rates, fleet: Fleet, filled: float) -> list[int]:
    """Move borders while the estimated time of all micro-batches falls and their tokens take at most ``filled`` of the memory."""
    sums = np.concatenate([[0.0], np.cumsum(lengths)])

    @cache
    def seconds(first: int, end: int) -> float:
        return estimate(lengths[first:end], rates, fleet, filled) if end > first else math.inf

    step = sums[-1] / (len(borders) - 1)
    for shift in SHIFTS:
        moved = True
        while moved:
            moved = False
            for place in range(1, len(borders) - 1):
                moved |= _move(borders, place, step * shift, sums, seconds)
    return borders


def _move(borders: list[int], place: int, tokens: float, sums: Numbers, seconds: Callable[[int, int], float]) -> bool:
    before, here, after = borders[place - 1 : place + 2]
    now = seconds(before, here) + seconds(here, after)
    for goal in (sums[here] + tokens, sums[here] - tokens):
        there = int(np.clip(np.searchsorted(sums, goal), before + 1, after - 1))
        if there != here and seconds(before, there) + seconds(there, after) < now * (1 - 1e-4):
            borders[place] = there
            return True
    return False


def estimate(lengths: Numbers, rates: Rates, fleet: Fleet, filled: float) -> float:
    """About how long one micro-batch takes; infinite if its tokens do not fit. A lower bound's demand, with lengths taken together."""
    if lengths.sum() > filled * fleet.devices * rates.tokens[0] / rates.degrees[0]:
        return math.inf
    low = Demand.of(lengths[:1], np.ones(1), rates).least_s()
    if math.isinf(low):
        return math.inf
    edges = np.unique(np.linspace(0, len(lengths), min(PIECES, len(lengths)) + 1).astype(int))
    counts = np.diff(edges).astype(np.float64)
    demand = Demand.of(np.add.reduceat(lengths, edges[:-1]) / counts, counts, rates)
    high = low + float((demand.busy * rates.degrees[:, None]).max(axis=0) @ counts)

    def suffices(deadline: float) -> bool:
        time = demand.time(deadline)
        return all(demand.devices(time, np.full(len(rates.degrees), mix)) <= fleet.devices for mix in MIXES)

    return least_deadline(low, high, suffices, STEPS)[1]

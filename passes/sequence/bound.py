"""No plan for a micro-batch is faster than this."""

from __future__ import annotations

import numpy as np

from hgc.passes.sequence.costs import Fleet, Numbers, Rates

STEPS = 14


def lower_bound(lengths: Numbers, rates: Rates, fleet: Fleet, high_s: float) -> float:
    """Seconds below which the devices do not suffice, at most ``high_s``.

    Groups of a degree are taken together: within a deadline they need ``degree`` devices for each deadline's worth of work and for each
    capacity's worth of tokens. Any mix of the two needs is a bound, so is the sum over sequences of their cheapest degree
    (Lagrange); the mix is improved degree by degree.
    """
    busy = rates.busy(lengths)
    share = lengths[None, :] / (rates.tokens / rates.degrees)[:, None]  # devices for its tokens, the same for every degree
    holds = lengths[None, :] <= rates.tokens[:, None]
    low = max(float(np.where(holds, busy + rates.fixed[:, None], np.inf).min(axis=0).max()), 0.0)
    if low >= high_s:
        return high_s
    mix = np.ones(len(rates.degrees))
    high = high_s
    if _needs(low * (1 + 1e-12), busy, share, holds, rates, mix, fleet) <= fleet.devices:
        return low
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _needs(middle, busy, share, holds, rates, mix, fleet) > fleet.devices * (1 + 1e-9):
            low = middle
        else:
            high = middle
    return low


def _needs(deadline: float, busy: Numbers, share: Numbers, holds: np.ndarray, rates: Rates, mix: Numbers, fleet: Fleet) -> float:
    """Devices, at least; improves ``mix`` in place and stops as soon as there are too few."""
    budget = deadline - rates.fixed
    fits = holds & (busy <= budget[:, None])
    time = np.where(fits, busy * (rates.degrees / budget)[:, None], np.inf)
    best = _devices(time, share, mix)
    if (found := _devices(time, share, np.ones_like(mix))) > best:  # an earlier deadline may have left a mix for tokens
        best, mix[:] = found, 1.0
    for step in (0.5, 0.25, 0.12, 0.06):
        for degree in range(len(mix)):
            for change in (-step, step):
                if best > fleet.devices * (1 + 1e-9):
                    return best
                tried = mix.copy()
                tried[degree] = min(1.0, max(0.0, tried[degree] + change))
                if tried[degree] != mix[degree] and (found := _devices(time, share, tried)) > best:
                    best, mix[:] = found, tried
    return best


def _devices(time: Numbers, share: Numbers, mix: Numbers) -> float:
    with np.errstate(invalid="ignore"):
        need = np.where(np.isinf(time), np.inf, mix[:, None] * np.where(np.isinf(time), 0.0, time) + (1 - mix)[:, None] * share)
    return float(need.min(axis=0).sum())

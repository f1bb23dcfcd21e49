"""How many devices a micro-batch needs within a deadline: no plan is faster than a deadline for which they do not suffice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgc.passes.sequence.costs import Fleet, Numbers, Rates

STEPS = 14
"""Halvings of the interval in which the deadline is."""
ENOUGH = 1 + 1e-9


@dataclass(frozen=True)
class Demand:
    """Of ``counts`` [n] sequences each, of ``lengths`` [n]: groups of a degree are taken together.

    Within a deadline they need ``degree`` devices for each deadline's worth of work, and for each capacity's worth of tokens. Any mix
    of the two needs is a bound, so is the sum over sequences of their cheapest degree (Lagrange).
    """

    busy: Numbers
    memory: Numbers
    holds: NDArray[np.bool_]
    counts: Numbers
    rates: Rates

    @staticmethod
    def of(lengths: Numbers, counts: Numbers, rates: Rates) -> Demand:
        memory = lengths * (rates.degrees[0] / rates.tokens[0])  # devices for its tokens, the same for every degree
        return Demand(rates.busy(lengths), memory, np.asarray(lengths[None, :] <= rates.tokens[:, None]), counts, rates)

    def time(self, deadline: float) -> Numbers:
        """[degrees, n]: devices for the work of each sequence; infinite where it does not fit."""
        budget = np.maximum(deadline - self.rates.fixed, 1e-12)
        fits = self.holds & (self.busy <= budget[:, None])
        return np.where(fits, self.busy * (self.rates.degrees / budget)[:, None], np.inf)

    def devices(self, time: Numbers, mix: Numbers) -> float:
        """At least so many; ``mix`` [degrees]: the share of work in the need, the rest is memory."""
        fits = np.isfinite(time)
        need = np.where(fits, mix[:, None] * np.where(fits, time, 0.0) + (1 - mix)[:, None] * self.memory[None, :], np.inf)
        return float(need.min(axis=0) @ self.counts)

    def least_s(self) -> float:
        """What the sequence takes that takes longest by itself; infinite where one does not fit."""
        return float(np.where(self.holds, self.busy + self.rates.fixed[:, None], np.inf).min(axis=0).max())


def least_deadline(low: float, high: float, suffices: Callable[[float], bool], steps: int = STEPS) -> tuple[float, float]:
    """An interval around where devices begin to suffice."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return low, high


def lower_bound(lengths: Numbers, rates: Rates, fleet: Fleet, high_s: float) -> float:
    """Seconds below which the devices do not suffice, at most ``high_s``; the mix of needs is improved degree by degree."""
    demand = Demand.of(lengths, np.ones(len(lengths)), rates)
    mix = np.ones(len(rates.degrees))
    low = demand.least_s()
    if low >= high_s:
        return high_s

    def suffices(deadline: float) -> bool:
        return _needs(demand, deadline, mix, fleet.devices) <= fleet.devices * ENOUGH

    return low if suffices(low * (1 + 1e-12)) else least_deadline(low, high_s, suffices)[0]


def _needs(demand: Demand, deadline: float, mix: Numbers, devices: int) -> float:
    """Devices, at least; improves ``mix`` in place and stops as soon as there are too few."""
    time = demand.time(deadline)
    best = demand.devices(time, mix)
    if (found := demand.devices(time, np.ones_like(mix))) > best:  # an earlier deadline may have left a mix for tokens
        best, mix[:] = found, 1.0
    for step in (0.5, 0.25, 0.12, 0.06):
        for degree in range(len(mix)):
            for change in (-step, step):
                if best > devices * ENOUGH:
                    return best
                tried = mix.copy()
                tried[degree] = min(1.0, max(0.0, tried[degree] + change))
                if tried[degree] != mix[degree] and (found := demand.devices(time, tried)) > best:
                    best, mix[:] = found, tried
    return best

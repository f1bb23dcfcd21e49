"""Groups for one batch: micro-batches, their groups, and a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hgc.errors import PlanError
from hgc.passes.sequence.blaster import better_borders, even_borders
from hgc.passes.sequence.bound import lower_bound
from hgc.passes.sequence.costs import Fleet, Numbers, SequenceCosts
from hgc.passes.sequence.groups import MicroBatch, SequencePlan
from hgc.passes.sequence.micro_batch import solve

TRIED = 5
"""How many numbers of micro-batches are tried, from the fewest that memory allows on (M' of the paper)."""
FILLED = (0.95, 0.88, 0.8, 0.7)
"""How full of tokens a micro-batch may be when its borders are chosen: the fuller, the harder to pack."""
Attempt = Callable[[Numbers, NDArray[np.int_], int, SequencePlan | None], SequencePlan | None]
"""``(descending lengths, their places in the batch, number of micro-batches, best so far)``: a plan, if one fits and beats the best."""


def plan_batch(lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet) -> SequencePlan:
    """The fastest plan found for sequences of ``lengths`` [n] tokens. Raises ``PlanError`` for lengths that no plan can hold."""

    def attempt(descending: Numbers, order: NDArray[np.int_], count: int, best: SequencePlan | None) -> SequencePlan | None:
        return _with(descending, order, count, costs, fleet, best)

    return best_count(lengths, costs, fleet, attempt, TRIED)


def best_count(lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet, attempt: Attempt, tried: int) -> SequencePlan:
    """The best of ``tried`` numbers of micro-batches that fit; more than could be faster are not tried."""
    given = checked(lengths, costs, fleet)
    order = np.argsort(-given, kind="stable")
    best: SequencePlan | None = None
    count = fewest(given, costs, fleet)
    while tried and count <= len(given):
        if best is not None and least_seconds(given[order], count, costs, fleet) >= best.seconds:
            break  # more micro-batches only add their fixed parts
        found = attempt(given[order], order, count, best)
        if found is not None:
            tried -= 1
            best = found if best is None or found.seconds < best.seconds else best
        count += 1
    assert best is not None, "one sequence for each micro-batch always fits"
    return best


def checked(lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet) -> Numbers:
    """Whole positive lengths that fit, as floating point numbers; raises ``PlanError``."""
    given = np.asarray(lengths)
    if given.ndim != 1 or not len(given):
        raise PlanError(f"lengths have the shape {given.shape}; expected one number for each sequence of a batch, and at least one")
    wrong = np.flatnonzero(~(np.isfinite(given.astype(np.float64)) & (given >= 1) & (given == np.floor(given))))
    if len(wrong):
        raise PlanError(f"sequence {wrong[0]} has {given[wrong[0]]} tokens; expected a whole number of 1 or more")
    longest = math.floor(fleet.degrees[-1] * costs.tokens_per_device)
    if given.max() > longest:
        raise PlanError(
            f"sequence {int(given.argmax())} has {int(given.max())} tokens, but {fleet.degrees[-1]} devices together hold "
            f"at most {longest}; drop or split it, or use more devices"
        )
    return given.astype(np.float64)


def fewest(lengths: Numbers, costs: SequenceCosts, fleet: Fleet) -> int:
    """Micro-batches that memory asks for, at least."""
    return max(1, math.ceil(float(lengths.sum()) / (fleet.devices * costs.tokens_per_device)))


def least_seconds(lengths: Numbers, micro_batches: int, costs: SequenceCosts, fleet: Fleet) -> float:
    """No step of so many micro-batches takes less: their fixed parts, and each sequence's work at its cheapest degree."""
    rates = costs.rates(fleet.degrees)
    work = np.where(lengths[None, :] <= rates.tokens[:, None], rates.busy(lengths) * rates.degrees[:, None], np.inf).min(axis=0)
    longest = np.where(lengths[0] <= rates.tokens, rates.fixed + rates.busy(lengths[:1])[:, 0], np.inf).min()
    fixed = float(rates.fixed.min())
    return costs.sharding.step_s + max(
        micro_batches * fixed + float(work.sum()) / fleet.devices, (micro_batches - 1) * fixed + float(longest)
    )


def _with(
    lengths: Numbers, order: NDArray[np.int_], count: int, costs: SequenceCosts, fleet: Fleet, best: SequencePlan | None
) -> SequencePlan | None:
    """The plan with ``count`` micro-batches; ``None`` if it does not fit or cannot beat ``best``."""
    even = even_borders(lengths, count)
    assert even is not None
    rates = costs.rates(fleet.degrees)
    found: SequencePlan | None = None
    seen: list[list[int]] = []
    for borders in (*(better_borders(lengths, list(even), rates, fleet, filled) for filled in FILLED), even):
        if borders in seen:
            continue
        seen.append(borders)
        limit = min((plan.seconds for plan in (found, best) if plan is not None), default=math.inf)
        found = _solve_all(lengths, order, borders, costs, fleet, limit) or found
    return found


def _solve_all(
    lengths: Numbers, order: NDArray[np.int_], borders: list[int], costs: SequenceCosts, fleet: Fleet, limit_s: float
) -> SequencePlan | None:
    """The micro-batches between ``borders``; ``None`` if one does not fit or all together will not be faster than ``limit_s``."""
    parts = [lengths[first:end] for first, end in pairwise(borders)]
    rates = costs.rates(fleet.degrees)
    expected = [lower_bound(part, rates, fleet, limit_s) if math.isfinite(limit_s) else 0.0 for part in parts]
    micro_batches: list[MicroBatch] = []
    for i, part in enumerate(parts):
        if costs.sharding.step_s + sum(each.seconds for each in micro_batches) + sum(expected[i:]) >= limit_s:
            return None
        solved = solve(part, rates, fleet)
        if solved is None:
            return None
        packed, bound = solved
        micro_batches.append(packed.micro_batch(part, order[borders[i] : borders[i + 1]], rates, fleet, bound))
    plan = SequencePlan(tuple(micro_batches), costs.sharding.step_s)
    return plan if plan.seconds < limit_s else None

"""The fastest groups for one micro-batch, and how fast any could be."""

from __future__ import annotations

import numpy as np

from hgc.passes.sequence.bound import lower_bound
from hgc.passes.sequence.costs import Fleet, Numbers, Rates
from hgc.passes.sequence.exact import Decision, OutOfNodesError
from hgc.passes.sequence.groups import Packed
from hgc.passes.sequence.pack import CHOSEN, PLAIN, pack

STEP = 1.015
"""From one deadline to the next."""
FEW = 150
"""Up to so many sequences many ways to pack are tried."""
EFFORTS = ((PLAIN, 6), (CHOSEN, 8))
"""Ways to pack, and for how many deadlines at once."""
TOLERANCE = 0.004
"""A plan this close to its bound is good enough."""
MOST_EXACT, NODES = 64, 3000
"""Up to how many sequences the exact search is tried, and for how many of its nodes in all."""


def solve(lengths: Numbers, rates: Rates, fleet: Fleet) -> tuple[Packed, float] | None:
    """Groups and a lower bound on the seconds of all groups, for descending ``lengths``; ``None`` if memory does not suffice."""
    best = homogeneous(lengths, rates, fleet) or next((p for p in pack(lengths, rates, fleet, np.array([1e30]), PLAIN) if p), None)
    if best is None:
        return None
    bound = lower_bound(lengths, rates, fleet, best.seconds(lengths, rates))
    best = _sweep(best, bound, lengths, rates, fleet)
    if len(lengths) <= MOST_EXACT:
        best, bound = _bisect(best, bound, lengths, rates, fleet)
    return best, bound


def homogeneous(lengths: Numbers, rates: Rates, fleet: Fleet) -> Packed | None:
    """As many groups of one degree as there are, each sequence where the work is least and memory suffices; the better of the two
    smallest degrees that hold all: larger ones only add communication, unless there are few sequences."""
    found: list[tuple[float, Packed]] = []
    for degree in range(len(rates.degrees)):
        if len(found) == 2 and len(lengths) > FEW:
            break
        if (one := spread(lengths, rates, degree, fleet.most_groups(fleet.degrees[degree]))) is not None:
            found.append(one)
    return min(found, key=lambda each: each[0])[1] if found else None


def spread(lengths: Numbers, rates: Rates, degree: int, groups: int) -> tuple[float, Packed] | None:
    """Longest first into the least busy of ``groups`` groups of one degree; seconds of the slowest, ``None`` if memory is short."""
    seconds, tokens = np.zeros(groups), np.zeros(groups)
    members: list[list[int]] = [[] for _ in range(groups)]
    busy = rates.busy(lengths)[degree]
    for i, s in enumerate(lengths):
        group = int(np.where(tokens + s <= rates.tokens[degree], seconds, np.inf).argmin())
        if tokens[group] + s > rates.tokens[degree]:
            return None
        seconds[group] += busy[i]
        tokens[group] += s
        members[group].append(i)
    used = [tuple(each) for each in members if each]
    return float(rates.fixed[degree] + seconds.max()), Packed((degree,) * len(used), tuple(used))


def _sweep(best: Packed, bound: float, lengths: Numbers, rates: Rates, fleet: Fleet) -> Packed:
    """Packings for deadlines between the bound and the best so far, ever closer to each other, in more and more ways."""
    efforts = EFFORTS if len(lengths) <= FEW else EFFORTS[:1]
    for ways, count in efforts:
        low = bound
        high = best.seconds(lengths, rates)
        while high > max(low, bound * (1 + TOLERANCE)) * (1 + TOLERANCE / 4):
            deadlines = np.geomspace(low, min(high, low * STEP**count), count + 1)[:-1]
            tried = pack(lengths, rates, fleet, deadlines, ways)
            first = next((i for i, one in enumerate(tried) if one is not None), None)
            if first is None:
                low = min(high, low * STEP**count)
            else:
                packed = tried[first]
                assert packed is not None
                best, high = packed, packed.seconds(lengths, rates)
                low = float(deadlines[first - 1]) if first else low
                if first == 0:
                    break
    return best


def _bisect(best: Packed, bound: float, lengths: Numbers, rates: Rates, fleet: Fleet) -> tuple[Packed, float]:
    """Close the gap by decisions, until it is small or the search takes too long."""
    high = best.seconds(lengths, rates)
    spent = 0
    while high > bound * (1 + TOLERANCE) and spent < NODES:
        middle = (high * bound) ** 0.5
        decision = Decision(lengths, rates, fleet, middle, NODES - spent)
        try:
            found = decision.run()
        except OutOfNodesError:
            break
        finally:
            spent += decision.visited
        if found is None:
            bound = middle
        else:
            best, high = found, found.seconds(lengths, rates)
    return best, bound

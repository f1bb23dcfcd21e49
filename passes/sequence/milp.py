"""The mixed-integer programme of FlexSP (arXiv:2412.01523, section 4.2) for one micro-batch, as the paper writes it."""

from __future__ import annotations

import warnings
from typing import Any

import cvxpy
import numpy as np

from hgc.passes.sequence.buckets import bucket_limits, padded
from hgc.passes.sequence.costs import Fleet, Numbers, Rates
from hgc.passes.sequence.groups import Packed

BUCKETS = 16
cp: Any = cvxpy  # its annotations lack most of its functions


def solve_milp(lengths: Numbers, rates: Rates, fleet: Fleet, limit_s: float, buckets: int = BUCKETS) -> Packed | None:
    """Groups for descending ``lengths``, from virtual groups of every degree, with lengths padded to bucket limits.

    ``None`` if HiGHS has found nothing after ``limit_s`` seconds, or nothing exists.
    """
    limits = bucket_limits(lengths, buckets)
    bucket = np.searchsorted(limits, lengths)
    counts = np.bincount(bucket, minlength=len(limits))
    virtual = [index for index, degree in enumerate(fleet.degrees) for _ in range(fleet.devices // degree)]
    used = cp.Variable(len(virtual), boolean=True)
    share = cp.Variable((len(limits), len(virtual)), integer=True)
    slowest = cp.Variable()
    busy = rates.busy(limits)[virtual]  # [groups, buckets]
    degrees = rates.degrees[virtual]
    fits = limits[:, None] <= rates.tokens[virtual][None, :]
    constraints = [
        share >= 0,
        cp.sum(cp.multiply(busy.T, share), axis=0) + cp.multiply(rates.fixed[virtual], used) <= slowest,
        limits @ share <= rates.tokens[virtual],
        degrees @ used <= fleet.devices,
        cp.sum(share, axis=0) <= len(lengths) * used,
        cp.sum(share, axis=1) == counts,
        share <= np.where(fits, len(lengths), 0),
    ]
    problem = cp.Problem(cp.Minimize(slowest), constraints)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # what is there when time is over need not be the best
            problem.solve(solver=cp.HIGHS, time_limit=limit_s)
    except cp.error.SolverError:
        return None
    if share.value is None:
        return None
    return _collect(np.rint(share.value).astype(int), virtual, bucket)


def _collect(share: np.ndarray, virtual: list[int], bucket: np.ndarray) -> Packed | None:
    waiting = [list(np.flatnonzero(bucket == b)) for b in range(share.shape[0])]
    degrees, members = [], []
    for group, degree in enumerate(virtual):
        chosen = [int(waiting[b].pop()) for b in range(share.shape[0]) for _ in range(share[b, group])]
        if chosen:
            degrees.append(degree)
            members.append(tuple(sorted(chosen)))
    return Packed(tuple(degrees), tuple(members)) if not any(waiting) else None


def padding_error(lengths: Numbers, buckets: int = BUCKETS) -> float:
    """Tokens that buckets add, as a part of all."""
    return float(padded(lengths, bucket_limits(lengths, buckets)).sum() / lengths.sum() - 1.0)

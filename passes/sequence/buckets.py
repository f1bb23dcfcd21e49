"""Lengths represented by few: the exact dynamic programme of FlexSP (section 5.1)."""

from __future__ import annotations

import numpy as np

from hgc.passes.sequence.costs import Numbers


def bucket_limits(lengths: Numbers, buckets: int) -> Numbers:
    """At most ``buckets`` upper limits, ascending, such that the sum over sequences of (limit of its bucket - length) is least."""
    values, counts = np.unique(lengths, return_counts=True)
    if len(values) <= buckets:
        return values
    amount = np.concatenate([[0.0], np.cumsum(counts)])
    total = np.concatenate([[0.0], np.cumsum(counts * values)])
    ends = np.arange(1, len(values) + 1)
    # padding[i, j]: values i..j-1 in one bucket
    padding = values[ends - 1][None, :] * (amount[ends][None, :] - amount[:-1, None]) - (total[ends][None, :] - total[:-1, None])
    padding = np.where(np.arange(len(values))[:, None] < ends[None, :], padding, np.inf)
    least = padding[0]
    choices = []
    for _ in range(buckets - 1):
        before = np.concatenate([[np.inf], least[:-1]])
        through = before[:, None] + padding
        choices.append(np.where(through.min(axis=0) < least, through.argmin(axis=0), 0))
        least = np.minimum(through.min(axis=0), least)
    limits, end = [], len(values)
    for chosen in reversed(choices):
        limits.append(values[end - 1])
        end = int(chosen[end - 1])
        if end == 0:
            break
    else:
        limits.append(values[end - 1])
    return np.array(sorted(limits))


def padded(lengths: Numbers, limits: Numbers) -> Numbers:
    """Every length's limit."""
    return limits[np.searchsorted(limits, lengths)]

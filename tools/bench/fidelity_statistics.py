"""What predictions are off by: per dataset and GPU, out-of-memory classification, and the order of plans within a sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from hgc.tools.bench.fidelity_rows import Row

GIB = 2.0**30
NOISE = 0.033
"""Median spread of the same configuration published more than once (163 configurations; README of the data)."""


@dataclass(frozen=True)
class Outcome:
    """A row with what was predicted for it; ``reason``: why nothing was. ``memory_bytes``: of the fullest device, as the row's
    source counts it; ``capacity_bytes``: what the device has for that."""

    row: Row
    step_s: float | None = None
    memory_bytes: float | None = None
    capacity_bytes: float | None = None
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def step_error(self) -> float | None:
        """predicted / published - 1"""
        if self.step_s is None or not self.row.step_time_s:
            return None
        return self.step_s / self.row.step_time_s - 1

    @property
    def memory_error(self) -> float | None:
        if self.memory_bytes is None or not self.row.mem_gib:
            return None
        return self.memory_bytes / GIB / self.row.mem_gib - 1

    @property
    def fits(self) -> bool | None:
        """Is the prediction that the row's plan fits into memory?"""
        if self.memory_bytes is None or self.capacity_bytes is None:
            return None
        return self.memory_bytes <= self.capacity_bytes


@dataclass(frozen=True)
class Spread:
    """Of |predicted / published - 1|: how many, median, 90th percentile; ``bias``: the median with its sign."""

    rows: int
    median: float
    p90: float
    bias: float


def spread(errors: Iterable[float | None]) -> Spread | None:
    """``None`` of no errors."""
    found = np.array([error for error in errors if error is not None])
    if not len(found):
        return None
    size = np.abs(found)
    return Spread(len(found), float(np.median(size)), float(np.quantile(size, 0.9)), float(np.median(found)))


def is_published(outcome: Outcome) -> bool:
    return outcome.row.step_time_kind == "published"


Key = tuple[str, str]


def grouped(outcomes: Iterable[Outcome], key: Callable[[Outcome], Key]) -> dict[Key, list[Outcome]]:
    found: dict[Key, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        found[key(outcome)].append(outcome)
    return dict(sorted(found.items()))


def by_dataset(outcome: Outcome) -> Key:
    return outcome.row.dataset, outcome.row.gpu


@dataclass(frozen=True)
class Classification:
    """Rows that ran and rows that ran out of memory, and how many of each are predicted to."""

    ran: int
    ran_right: int
    out: int
    out_right: int

    @property
    def accuracy(self) -> float:
        return (self.ran_right + self.out_right) / max(self.ran + self.out, 1)


def classify(outcomes: Iterable[Outcome]) -> Classification:
    """Over rows with a prediction of memory that either say that they ran out of it, or state a result."""
    judged = [o for o in outcomes if o.fits is not None and (o.row.ran_out_of_memory or o.row.step_time_s or o.row.mem_gib)]
    out = [o for o in judged if o.row.ran_out_of_memory]
    ran = [o for o in judged if not o.row.ran_out_of_memory]
    return Classification(len(ran), sum(bool(o.fits) for o in ran), len(out), sum(not o.fits for o in out))


def with_failures(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Those of datasets in which some row ran out of memory: elsewhere nothing is told apart."""
    datasets = {o.row.dataset for o in outcomes if o.row.ran_out_of_memory}
    return [o for o in outcomes if o.row.dataset in datasets]


@dataclass(frozen=True)
class Order:
    """Pairs of plans of one sweep that are published in some order; Kendall's tau is (right - wrong) / pairs."""

    pairs: int
    right: int
    wrong: int

    @property
    def tau(self) -> float:
        return (self.right - self.wrong) / max(self.pairs, 1)


def sweep_of(row: Row) -> tuple[object, ...]:
    """Rows of one sweep differ in their plan only; what the notes say first tells conditions apart (software, tuning)."""
    model = (row.model if row.layers is None else "", row.layers, row.hidden, row.heads, row.vocab, row.seq_len)
    return (row.dataset, *model, row.gpu, row.gpus, row.precision, row.recompute, row.notes.split(";")[0])


def plan_key(row: Row) -> tuple[object, ...]:
    """What the rows of a sweep differ in."""
    return (row.tp, row.pp, row.vpp, row.cp, row.mbs, row.gbs, row.sharding, row.notes if row.tp is None else "")


def order(outcomes: Iterable[Outcome], least: float = 0.0) -> Order:
    """Over all pairs of unlike plans within sweeps whose published seconds a sequence differ by more than ``least``."""
    sweeps: dict[tuple[object, ...], list[tuple[tuple[object, ...], float, float]]] = defaultdict(list)
    for outcome in outcomes:
        row = outcome.row
        if outcome.step_s and row.step_time_s and row.gbs:
            sweeps[sweep_of(row)].append((plan_key(row), outcome.step_s / row.gbs, row.step_time_s / row.gbs))
    pairs = right = wrong = 0
    for members in sweeps.values():
        for (plan, predicted, published), (other, other_predicted, other_published) in combinations(members, 2):
            if plan == other or abs(np.log(published / other_published)) <= np.log1p(least):
                continue
            pairs += 1
            sign = (predicted - other_predicted) * (published - other_published)
            right, wrong = right + (sign > 0), wrong + (sign < 0)
    return Order(pairs, right, wrong)

"""``hgc bench experts``: hgc's own plans beside those that experts have tuned and published, both simulated on the same cluster.

Rows of ``hgc bench fidelity`` whose framework is Megatron's, NeMo, torchtitan or nanotron are rebuilt: model, cluster, batch, precision and
runtime. hgc searches a plan for the same job, without seeing the published one, and the simulator predicts both.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from rich.table import Table

from hgc.errors import HgcError
from hgc.tools.bench import targets
from hgc.tools.bench.experts_plans import Compared, Known, check_expert, compared, job_of
from hgc.tools.bench.fidelity_models import NotRebuilt
from hgc.tools.bench.fidelity_predict import Case, case_of
from hgc.tools.bench.fidelity_rows import read
from hgc.tools.bench.machine import machine
from hgc.tools.console import heading, out, say, table

AS_FAST = 0.995
"""No simulation tells apart steps that differ by less."""
SHARE = 0.95
_WORST = 8


def run(data: str = "", cases: int = 0, seed: int = 0, processes: int = 1) -> dict[str, Any]:
    """Compare, print tables, and return what JSON should hold.

    ``data``: a CSV file of published rows or a folder of them. ``cases``: so many jobs, drawn with ``seed``; 0: all. A job has as many rows
    as published plans. Raises ``HgcError`` for data that cannot be read, or holds no such row.
    """
    if not data:
        raise HgcError("the experts benchmark needs published rows; give --data FOLDER, or a CSV with their columns")
    jobs, left_out = jobs_of(Path(data))
    total = len(jobs)
    if cases and cases < total:
        jobs = random.Random(seed).sample(jobs, cases)
    found = _all(jobs, processes or os.cpu_count() or 1)
    report(found, left_out, len(jobs), total)
    rows, held = list(map(encoded, found)), [target(found)]
    return {"bench": "experts", "machine": machine(), "jobs": len(jobs), "of": total, "rows": rows, "targets": held}


def jobs_of(data: Path) -> tuple[list[list[Case]], Counter[str]]:
    """Rows by job, and reasons why others are none. Raises ``HgcError`` if there is no job."""
    rows, shapes = read(data)
    jobs: dict[tuple[object, ...], list[Case]] = {}
    reasons: Counter[str] = Counter()
    for row in rows:
        try:
            case = case_of(row, shapes, rows)
            check_expert(case)
        except NotRebuilt as missing:
            reasons[str(missing)] += 1
        else:
            jobs.setdefault(job_of(case), []).append(case)
    if not jobs:
        raise HgcError(f"{str(data)!r} holds no dense row of an expert's framework that can be rebuilt; give the published rows")
    return list(jobs.values()), reasons


def _all(jobs: Sequence[list[Case]], processes: int) -> list[Compared]:
    """Jobs of one architecture go to one process, which lowers and measures what they share once."""
    alike: dict[tuple[object, ...], list[list[Case]]] = {}
    for job in jobs:
        alike.setdefault((job[0].architecture, job[0].row.precision), []).append(job)
    found: list[Compared] = []
    with Progress(console=out, transient=True) as progress:
        task = progress.add_task("plan and simulate", total=len(jobs))
        for group, results in zip(alike.values(), _results(list(alike.values()), processes), strict=True):
            found += results
            progress.advance(task, len(group))
    return found


def _results(groups: Sequence[list[list[Case]]], processes: int) -> Iterable[list[Compared]]:
    if processes == 1 or len(groups) < 2:
        yield from map(_compared, groups)
        return
    with ProcessPoolExecutor(min(processes, len(groups)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compared, groups)


def _compared(jobs: list[list[Case]]) -> list[Compared]:
    torch.set_num_threads(1)
    known: Known = {}
    return [each for job in jobs for each in compared(job, known)]


def target(found: Sequence[Compared]) -> dict[str, Any]:
    """Of rows whose published plan was simulated; one for which hgc finds no plan counts as slower. Without any it does not hold."""
    ratios = [each.ratio for each in found if each.published_s]
    share = sum(ratio >= AS_FAST for ratio in ratios) / len(ratios) if ratios else None
    name = f"share of {len(ratios)} rows in which hgc's plan is at least as fast as the published one, both simulated"
    return targets.target(name, share, SHARE, at_least=True)


def encoded(found: Compared) -> dict[str, Any]:
    return asdict(found) | {"ratio": found.ratio}


def report(found: Sequence[Compared], left_out: Counter[str], jobs: int, total: int) -> None:
    simulated = [each for each in found if each.published_s]
    heading(f"Published plan's step / hgc's, {jobs} of {total} jobs")
    table(_spreads(simulated))
    heading("Where hgc's plan is slowest beside the published one")
    table(_worst(simulated))
    heading("Not compared")
    reasons = Counter(each.reason for each in found if each.reason) + left_out
    for reason, count in reasons.most_common():
        say(f"  {count:4d}  {reason}")
    held = target(found)
    value = "no rows" if held["value"] is None else f"{held['value']:.3f}"
    say(f"  {'holds' if held['holds'] else 'FAILS'}  {held['name']}: {value} (limit {SHARE})")


def _spreads(found: Sequence[Compared]) -> Table:
    made = Table("dataset", "rows", "least", "10 %", "median", "90 %", "as fast", "s of search", box=None, header_style="dim")
    for name in [*sorted({each.dataset for each in found}), "all"]:
        members = [each for each in found if name in (each.dataset, "all")]
        if members:
            ratios = np.array([each.ratio for each in members])
            quantiles = (f"{value:.3f}" for value in (ratios.min(), *np.quantile(ratios, (0.1, 0.5, 0.9))))
            search_s = float(np.median([each.search_s for each in members]))
            made.add_row(name, str(len(members)), *quantiles, f"{(ratios >= AS_FAST).mean():.0%}", f"{search_s:.0f}")
    return made


def _worst(found: Sequence[Compared]) -> Table:
    made = Table("row", "ratio", "published", "hgc's", box=None, header_style="dim")
    for each in sorted(found, key=lambda each: each.ratio)[:_WORST]:
        made.add_row(each.id, f"{each.ratio:.3f}", each.published, each.found or each.reason)
    return made

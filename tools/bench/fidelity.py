"""``hgc bench fidelity``: predictions against published training runs.

Each row of the data is rebuilt through hgc's own parts: an ordinary module, traced; the row's plan, lowered; its costs; the simulator.
No time of a training step has entered a constant. Rows that cannot be rebuilt are listed with the reason. docs/fidelity.md says where it
is off, and why.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress
from rich.table import Table

from hgc.errors import HgcError
from hgc.tools.bench.fidelity_models import NotRebuilt
from hgc.tools.bench.fidelity_predict import Case, Predictor, case_of
from hgc.tools.bench.fidelity_rows import read
from hgc.tools.bench.fidelity_statistics import (
    NOISE,
    Outcome,
    Spread,
    by_dataset,
    classify,
    grouped,
    is_published,
    order,
    spread,
    with_failures,
)
from hgc.tools.bench.machine import machine
from hgc.tools.bench.targets import target
from hgc.tools.console import heading, out, say, table

STEP_MEDIAN, STEP_P90, MEMORY_MEDIAN = 0.10, 0.25, 0.08
ACCURACY, TAU = 0.90, 0.80


def run(data: str = "", processes: int = 0) -> dict[str, Any]:
    """Predict every row under ``data`` (a CSV file or a folder of them), print tables, and return what JSON should hold.

    ``processes``: 0 means one for each core. Raises ``HgcError`` for data that cannot be read.
    """
    if not data:
        raise HgcError("the fidelity benchmark needs published rows; give --data FOLDER, or a CSV with their columns")
    rows, shapes = read(Path(data))
    outcomes: list[Outcome] = []
    cases: list[Case] = []
    for row in rows:
        try:
            cases.append(case_of(row, shapes, rows))
        except NotRebuilt as missing:
            outcomes.append(Outcome(row, reason=str(missing)))
    outcomes += predict_all(cases, processes or os.cpu_count() or 1)
    position = {row.place: number for number, row in enumerate(rows)}
    outcomes.sort(key=lambda outcome: position[outcome.row.place])
    found = targets(outcomes)
    report(outcomes, found)
    return {"bench": "fidelity", "machine": machine(), "rows": [encoded(outcome) for outcome in outcomes], "targets": found}


def predict_all(cases: Sequence[Case], processes: int) -> list[Outcome]:
    """All cases; those of one model go to one process, which traces it once."""
    groups: dict[str, list[Case]] = {}
    for case in cases:
        shape = case.architecture
        groups.setdefault(f"{shape.hidden} {shape.heads} {shape.ffn} {shape.vocab} {case.layout.tp}", []).append(case)
    batches = sorted(groups.values(), key=len, reverse=True)
    found: list[Outcome] = []
    with Progress(console=out, transient=True) as progress:
        task = progress.add_task("predict", total=len(cases))
        for outcomes in _batches(batches, processes):
            found += outcomes
            progress.advance(task, len(outcomes))
    return found


def _batches(batches: Sequence[list[Case]], processes: int) -> Iterable[list[Outcome]]:
    if processes == 1 or len(batches) < 2:
        yield from map(_predict, batches)
        return
    with ProcessPoolExecutor(min(processes, len(batches)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_predict, batches)


def _predict(cases: list[Case]) -> list[Outcome]:
    torch.set_num_threads(1)
    predictor = Predictor()
    return [predictor(case) for case in cases]


def targets(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Those of the cost model, over dense rows; a target without any row does not hold."""
    steps = spread(outcome.step_error for outcome in outcomes if is_published(outcome))
    memory = spread(outcome.memory_error for outcome in outcomes)
    classes, plans = classify(with_failures(outcomes)), order(outcomes)
    accuracy = classes.accuracy if classes.ran + classes.out else None
    return [
        target("step time of dense published rows: median |predicted / published - 1|", steps.median if steps else None, STEP_MEDIAN),
        target("step time of dense published rows: 90th percentile", steps.p90 if steps else None, STEP_P90),
        target("memory: median |predicted / published - 1|", memory.median if memory else None, MEMORY_MEDIAN),
        target("out of memory: accuracy in sweeps with failures", accuracy, ACCURACY, at_least=True),
        target("order of plans in a sweep: Kendall's tau", plans.tau if plans.pairs else None, TAU, at_least=True),
    ]


def encoded(outcome: Outcome) -> dict[str, Any]:
    """A row of the JSON file: what was published, what was predicted, what was assumed."""
    row = outcome.row
    return {
        "id": row.id,
        "dataset": row.dataset,
        "gpu": row.gpu,
        "place": row.place,
        "published_step_s": row.step_time_s,
        "step_time_kind": row.step_time_kind,
        "predicted_step_s": outcome.step_s,
        "step_error": outcome.step_error,
        "published_memory_gib": row.mem_gib,
        "predicted_memory_bytes": outcome.memory_bytes,
        "memory_error": outcome.memory_error,
        "published_out_of_memory": row.ran_out_of_memory,
        "predicted_fits": outcome.fits,
        "reason": outcome.reason,
        "notes": list(outcome.notes),
    }


# -- tables -------------------------------------------------------------------------------------------------------------------------------


def report(outcomes: Sequence[Outcome], found: Sequence[dict[str, Any]]) -> None:
    heading("Step time: |predicted / published - 1|")
    table(_spreads([o for o in outcomes if is_published(o)], "published"))
    table(_spreads([o for o in outcomes if not is_published(o)], "derived from tokens or FLOP/s"))
    heading("Memory: |predicted / published - 1|")
    table(_spreads(outcomes, "", memory=True))
    heading("Out of memory, and order of plans")
    for name, chosen in (("sweeps with failures", with_failures(outcomes)), ("all rows", outcomes)):
        judged = classify(chosen)
        say(f"  {name}: {judged.ran_right} of {judged.ran} that ran fit, {judged.out_right} of {judged.out} that failed do not")
    plans, clear = order(outcomes), order(outcomes, NOISE)
    say(f"  pairs of plans in published order: {plans.right} of {plans.pairs}; of those 3.3 % apart: {clear.right} of {clear.pairs}")
    heading("Not rebuilt")
    for reason, count in Counter(outcome.reason for outcome in outcomes if outcome.reason).most_common():
        say(f"  {count:4d}  {reason}")
    heading("Targets")
    for each in found:
        value = "no rows" if each["value"] is None else f"{each['value']:.3f}"
        say(f"  {'holds' if each['holds'] else 'FAILS'}  {each['name']}: {value} (limit {each['limit']})")


def _spreads(outcomes: Sequence[Outcome], title: str, memory: bool = False) -> Table:
    made = Table(title, "GPU", "rows", "median", "p90", "bias", box=None, header_style="dim")
    found = grouped(outcomes, by_dataset)
    for (dataset, gpu), members in [*found.items(), (("all", ""), list(outcomes))]:
        errors = spread(o.memory_error if memory else o.step_error for o in members)
        if errors is not None:
            made.add_row(dataset, gpu, *_cells(errors))
    return made


def _cells(found: Spread) -> list[str]:
    return [str(found.rows), *(f"{100 * value:.1f} %" for value in (found.median, found.p90)), f"{100 * found.bias:+.1f} %"]

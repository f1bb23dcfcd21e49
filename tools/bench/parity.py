"""``hgc bench parity``: random models under random plans on random shapes, against the unmodified model on one device.

Loss, every gradient and the weights after three optimizer steps must agree to 1e-5 in float32 and 1e-10 in float64. Ranks are threads of
one process, which is about twenty times quicker than processes. A plan that the model cannot run must be refused by name; refusals
are counted. A failing case is made as small as it stays failing, and printed with the command that repeats it. See
docs/design/verification.md.
"""

from __future__ import annotations

import multiprocessing
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from hgc.tools.bench.machine import machine
from hgc.tools.bench.parity_cases import ParityCase
from hgc.tools.bench.parity_check import STEPS, Outcome, check
from hgc.tools.bench.parity_draw import GROUP, draw
from hgc.tools.bench.parity_shrink import shrink
from hgc.tools.bench.targets import target
from hgc.tools.console import out, say, table

REPEAT = "hgc bench parity --case '{}'"
SHOWN = 3
"""Failing cases that are made small."""
Found = tuple[ParityCase, Outcome]


def run(cases: int = 100, seed: int = 0, case: str | None = None, jobs: int = 1) -> dict[str, Any]:
    """Compare ``cases`` random cases of a seed, or the one given as text, in ``jobs`` processes; print a table, and return what JSON
    should hold, with the number of cases that are ``wrong``."""
    found = [(one := ParityCase.parse(case), check(one))] if case else list(_all(cases, seed, jobs))
    bad = [each for each, outcome in found if outcome.bad]
    table(_table(found))
    for each in bad[:SHOWN]:
        small, outcome = shrink(each, check)
        say(f"{outcome.kind}: {outcome.what}\n  {REPEAT.format(small)}", "bold red")
    for each in bad[SHOWN:]:
        say(f"also:\n  {REPEAT.format(each)}", "bold red")
    equal = sum(outcome.kind == "equal" for _, outcome in found)
    return {
        "bench": "parity",
        "machine": machine(),
        "rows": [{"case": str(each), "outcome": outcome.kind, "what": outcome.what, "worst": outcome.worst} for each, outcome in found],
        "wrong": len(bad),
        "targets": [
            target(f"mismatches and failures in {len(found)} cases", len(bad), 0),
            target("share of cases that ran", equal / len(found), 0.5, at_least=True),
        ],
    }


def _all(cases: int, seed: int, jobs: int) -> Iterator[Found]:
    """Group by group, because a group shares what was traced."""
    groups = [(seed, first, min(first + GROUP, cases)) for first in range(0, cases, GROUP)]
    if jobs == 1:
        for group in track(groups, "compare", console=out, transient=True):
            yield from check_group(group)
        return
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,), max_tasks_per_child=40) as pool:
        for found in track(pool.map(check_group, groups), "compare", len(groups), console=out, transient=True):
            yield from found


def check_group(group: tuple[int, int, int]) -> list[Found]:
    """Seed, first number, and the number behind the last."""
    seed, first, end = group
    return [(case, check(case)) for case in (draw(seed, index) for index in range(first, end))]


def _table(found: list[Found]) -> Table:
    shown = Table(title=f"emitted programs against the model on one device, {STEPS} steps")
    for column in ("model", "cases", "equal", "refused", "different", "failed", "largest difference"):
        shown.add_column(column, justify="left" if column == "model" else "right")
    for name in sorted({case.model for case, _ in found}):
        of_model = [outcome for case, outcome in found if case.model == name]
        kinds = Counter(outcome.kind for outcome in of_model)
        worst = max((outcome.worst for outcome in of_model if outcome.kind == "equal"), default=0.0)
        numbers = (len(of_model), kinds["equal"], kinds["refused"], kinds["different"], kinds["failed"])
        shown.add_row(name, *map(str, numbers), f"{worst:.0e}")
    return shown

"""``hgc bench parity``: random models under random plans on random shapes, against the unmodified model on one device.

Loss, every gradient and the weights after three optimizer steps must agree to 1e-5 in float32 and 1e-10 in float64. Ranks are threads of
this process, which is about twenty times quicker than processes. A plan that the model cannot run must be refused by name; refusals
are counted. A failing case is made as small as it stays failing, and printed with the command that repeats it.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table

from hgc import compiler
from hgc.backends import parity, torchrun
from hgc.errors import HgcError
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tools.bench.machine import machine
from hgc.tools.bench.parity_cases import ParityCase, draw, smaller
from hgc.tools.console import out, say, table
from hgc.tracing import trace

STEPS = 3
SHRINKS = 40
"""Tries to make a failing case smaller."""
REPEAT = "hgc bench parity --case '{}'"


@dataclass(frozen=True)
class Outcome:
    """``kind`` is "equal", "refused" (with the sentence), "different" or "failed" (an error that is no refusal)."""

    kind: str
    what: str = ""
    worst: float = 0.0

    @property
    def bad(self) -> bool:
        return self.kind in ("different", "failed")


def run(cases: int = 100, seed: int = 0, case: str | None = None) -> dict[str, Any]:
    """Compare ``cases`` random cases of a seed, or the one given as text; print a table, and return what JSON should hold."""
    chosen = [ParityCase.parse(case)] if case else [draw(seed, index) for index in range(cases)]
    found = [(each, check(each)) for each in track(chosen, "compare", console=out, transient=True)]
    bad = [(each, outcome) for each, outcome in found if outcome.bad]
    small = [shrink(each, check) for each, _ in bad[:3]]
    table(_table(found))
    for each, outcome in small:
        say(f"{outcome.kind}: {outcome.what}\n  {REPEAT.format(each)}", "bold red")
    equal = sum(outcome.kind == "equal" for _, outcome in found)
    return {
        "bench": "parity",
        "machine": machine(),
        "rows": [{"case": str(each), "outcome": outcome.kind, "what": outcome.what, "worst": outcome.worst} for each, outcome in found],
        "targets": [
            {"name": f"mismatches and failures in {len(found)} cases", "value": len(bad), "limit": 0, "holds": not bad},
            {"name": "share of cases that ran", "value": equal / len(found), "limit": 0.5, "holds": equal / len(found) >= 0.5},
        ],
    }


def check(case: ParityCase) -> Outcome:
    """Compile one case, run it on threads, and compare."""
    try:
        return _compare(case)
    except HgcError as refused:
        return Outcome("refused", str(refused))
    except Exception as error:  # whatever goes wrong is a finding, and the others shall still run
        return Outcome("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")


def _compare(case: ParityCase) -> Outcome:
    model, batch, loss = case.build()
    plan = Plan(Strategy.parse(case.plan), micro_batches=case.micro_batches)
    program = compiler.distribute(trace(model, batch, loss=loss), plan)
    with tempfile.TemporaryDirectory(prefix="hgc-parity-") as folder:
        target = Path(folder) / "program"
        with torchrun.staged(target) as staging:
            torchrun.write(staging, program, plan)
        report = parity.verify(
            target, reference=parity.make(model, batch, loss), dtype=getattr(torch, case.dtype), steps=STEPS, ranks="threads"
        )
    worst = max(report.differences, key=lambda difference: difference.value)
    return Outcome("equal" if report.ok else "different", "" if report.ok else f"{report}; worst at {worst.where}", worst.value)


def shrink(case: ParityCase, judge: Callable[[ParityCase], Outcome]) -> tuple[ParityCase, Outcome]:
    """The smallest failing case that single simplifications lead to."""
    outcome, tries = judge(case), 0
    while tries < SHRINKS:
        for simpler in smaller(case):
            tries += 1
            found = judge(simpler)
            if found.bad:
                case, outcome = simpler, found
                break
        else:
            break
    return case, outcome


def _table(found: list[tuple[ParityCase, Outcome]]) -> Table:
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

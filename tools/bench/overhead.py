"""``hgc bench overhead``: what hgc's abstraction costs, against programs written by hand.

Emitted programs and their baselines (the eager Hugging Face model; DDP, FSDP2, DTensor tensor parallelism and torch's pipelines under
the same plan) train in the same processes, step by step in turn, on the same batches from the same weights; the losses must agree. A
step is forward, backward, gradient synchronisation, AdamW and clearing the gradients.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table

from hgc import compiler
from hgc.errors import ArtifactError
from hgc.passes.sharding.plan_text import PlanText
from hgc.tools.bench.job import run_cases
from hgc.tools.bench.machine import machine
from hgc.tools.bench.overhead_baselines import describe
from hgc.tools.bench.overhead_models import MODELS, Size, global_batch
from hgc.tools.bench.overhead_ratios import Pairs, ratio
from hgc.tools.bench.overhead_worker import Case
from hgc.tools.bench.targets import target
from hgc.tools.console import say, stage, table

WORKER = "hgc.tools.bench.overhead_worker"
LIMIT, LOSS_LIMIT = 1.05, 1e-4
SIZE = Size(hidden=256, layers=4, heads=8, vocabulary=2048, rows=4, length=128)
COMPARISONS = (
    ("Llama", "dp1"),
    ("GPT-2", "dp1"),
    ("Llama", "dp4"),
    ("Llama", "dp4 zero3"),
    ("Llama", "tp4"),
    ("Llama", "dp2 tp2 zero3"),
    ("GPT-2", "dp4"),
    ("GPT-2", "dp4 zero3"),
    ("GPT-2", "tp4"),
    ("Llama", "pp4 1f1b micro4"),
    ("Llama", "pp4 gpipe micro4"),
    ("Llama", "pp2 virtual2 micro4"),
    ("Llama", "pp4 virtual2 micro4"),
)


COMPILED = (("Llama", "dp1"), ("GPT-2", "dp1"))
"""Rows that show what ``compile_blocks`` gains: the emitted program with it, over itself without."""


def run(
    comparisons: Sequence[tuple[str, str]] = COMPARISONS,
    size: Size = SIZE,
    pairs: int = 30,
    warmup: int = 3,
    timeout_s: float = 900.0,
    compiled: Sequence[tuple[str, str]] = COMPILED,
) -> dict[str, Any]:
    """Measure every (model, strategy), then those of ``compiled``, print the table, and return what JSON should hold.

    Raises ``ArtifactError`` if a process fails, or if a baseline does not compute what the emitted program computes.
    """
    with tempfile.TemporaryDirectory(prefix="hgc-overhead-") as folder:
        cases = []
        with stage("compile"):
            for index, (model, strategy) in enumerate([*comparisons, *compiled]):
                where = Path(folder) / f"program{index}"
                deep = _deep_enough(size, strategy)
                compiler.compile(MODELS[model](deep), global_batch(deep, 0), plan=strategy).save(where)
                cases.append(Case(model, strategy, deep, str(where), warmup, pairs, index >= len(comparisons)))
        measured: list[tuple[Case, Pairs]] = []
        for ranks in sorted({_ranks(case) for case in cases}):
            chosen = [case for case in cases if _ranks(case) == ranks]
            with stage(f"measure on {ranks} process{'es' if ranks > 1 else ''}"):
                measured += zip(chosen, run_cases(Path(folder), WORKER, chosen, Pairs, ranks, timeout_s), strict=True)
    rows = [row(case, found) for case, found in measured]
    table(_table(rows, size))
    say(f"ratio: median of {pairs} pairs of steps (first to third quartile), emitted program / baseline; processor time summed over ranks")
    return {
        "bench": "overhead",
        "machine": machine(backend="gloo", threads_for_each_process=1),
        "rows": rows,
        "targets": [each for row in rows for each in _targets(row)],
    }


def _described(text: str) -> str:
    words = PlanText.parse(text)
    return describe(words.strategy) if words.places == 1 else "torch.distributed.pipelining"


def _deep_enough(size: Size, text: str) -> Size:
    """A layer for each stage between the first, which has the embedding, and the last, which has the head."""
    words = PlanText.parse(text)
    return replace(size, layers=max(size.layers, words.places * words.virtual - 2))


def _ranks(case: Case) -> int:
    return PlanText.parse(case.strategy).devices


def row(case: Case, found: Pairs) -> dict[str, Any]:
    """One line of the table; raises ``ArtifactError`` if the two sides do not compute the same losses."""
    baseline = "itself, not compiled" if case.compiled else _described(case.strategy)
    if not found.loss_difference <= LOSS_LIMIT:
        raise ArtifactError(
            f"{case.model} under {case.strategy}: the losses of the emitted program and of {baseline} differ by "
            f"{found.loss_difference:.1e} (relative), expected at most {LOSS_LIMIT:.0e}; run hgc verify to find which of them is wrong"
        )
    wall, cpu = ratio(found.emitted_s, found.baseline_s), ratio(found.emitted_cpu_s, found.baseline_cpu_s)
    return {
        "model": case.model,
        "plan": f"{case.strategy}, blocks compiled" if case.compiled else case.strategy,
        "baseline": baseline,
        "pairs": case.pairs,
        "emitted_s": sorted(found.emitted_s)[case.pairs // 2],
        "baseline_s": sorted(found.baseline_s)[case.pairs // 2],
        "ratio": wall.median,
        "ratio_quartiles": [wall.low, wall.high],
        "emitted_cpu_s": sorted(found.emitted_cpu_s)[case.pairs // 2],
        "baseline_cpu_s": sorted(found.baseline_cpu_s)[case.pairs // 2],
        "cpu_ratio": cpu.median,
        "cpu_ratio_quartiles": [cpu.low, cpu.high],
        "loss_difference": found.loss_difference,
    }


def _targets(row: dict[str, Any]) -> list[dict[str, Any]]:
    name = f"{row['model']} {row['plan']}: step time / {row['baseline']}"
    return [target(name, row["ratio"], LIMIT)]


def _table(rows: Sequence[dict[str, Any]], size: Size) -> Table:
    batch = f"{size.rows} x {size.length} tokens"
    shape = f"{size.layers} layers or one for each stage, hidden {size.hidden}, global batch {batch}"
    found = Table(title=f"emitted programs against hand-written ones: {shape}")
    for column in ("model", "plan", "baseline"):
        found.add_column(column, overflow="fold")
    for column in ("emitted ms", "baseline ms", "ratio", "quartiles", "CPU ratio", "quartiles", "loss differs", ""):
        found.add_column(column, justify="right")
    for row in rows:
        found.add_row(
            *(row["model"], row["plan"], row["baseline"]),
            *(f"{1e3 * row['emitted_s']:.0f}", f"{1e3 * row['baseline_s']:.0f}"),
            *(f"{row['ratio']:.3f}", _span(row["ratio_quartiles"]), f"{row['cpu_ratio']:.3f}", _span(row["cpu_ratio_quartiles"])),
            *(f"{row['loss_difference']:.0e}", "ok" if row["ratio"] <= LIMIT else f"> {LIMIT}"),
        )
    return found


def _span(quartiles: Sequence[float]) -> str:
    return f"{quartiles[0]:.2f}-{quartiles[1]:.2f}"

"""``hgc bench local``: predictions against measurements on the machines at hand.

One job measures its own machines (as ``hgc profile`` does), then trains emitted programs on them; the simulator predicts the steps from
the measured cluster alone. The bytes that leave nodes are counted by their network interfaces. ``--launch COMMAND`` starts the ranks
with something else than torchrun on this machine: a command that runs what follows it on every rank, with torchrun's variables set
(``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR``, ``MASTER_PORT``).
"""

from __future__ import annotations

import shlex
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from hgc import compiler, records
from hgc.backends.simulator import Simulation
from hgc.cluster import Cluster
from hgc.tools.bench.job import run_cases
from hgc.tools.bench.local_worker import CLUSTER, Case, Steps
from hgc.tools.bench.machine import machine
from hgc.tools.bench.overhead_models import MODELS, Size, global_batch
from hgc.tools.bench.targets import target
from hgc.tools.console import say, stage, table

WORKER = "hgc.tools.bench.local_worker"
RANKS = 4
STEP_LIMIT, BYTES_LIMIT = 0.20, 0.01
SIZES = (
    Size(hidden=256, layers=4, heads=8, vocabulary=2048, rows=8, length=128),
    Size(hidden=512, layers=2, heads=8, vocabulary=1024, rows=8, length=64),
)
STRATEGIES = ("dp4", "dp4 zero3", "tp4", "dp2 tp2", "dp2 tp2 zero3")
FRAMES = 1.0085
"""Bytes on a wire over bytes of a message: headers of Ethernet, IP and TCP in frames of 9000, and their acknowledgements."""


def run(
    launch: str | None = None,
    strategies: Sequence[str] = STRATEGIES,
    sizes: Sequence[Size] = SIZES,
    steps: int = 12,
    timeout_s: float = 1500.0,
) -> dict[str, Any]:
    """Measure and predict every (model, size, strategy); print the table, and return what JSON should hold.

    Raises ``ArtifactError`` if a process fails.
    """
    with tempfile.TemporaryDirectory(prefix="hgc-local-") as folder:
        cases: list[Case] = []
        executables: list[compiler.Executable] = []
        with stage("compile"):
            for size in sizes:
                for model in MODELS:
                    for strategy in strategies:
                        where = Path(folder) / f"program{len(cases)}"
                        executables.append(compiler.compile(MODELS[model](size), global_batch(size, 0), plan=strategy))
                        executables[-1].save(where)
                        cases.append(Case(model, strategy, size, str(where), 3, steps))
        with stage(f"profile and measure on {RANKS} processes"):
            measured = run_cases(Path(folder), WORKER, cases, Steps, RANKS, timeout_s, shlex.split(launch or ""))
        cluster = Cluster.load(Path(folder) / CLUSTER)
    with stage("simulate"):
        rows = [_row(case, found, each.simulate(cluster)) for case, found, each in zip(cases, measured, executables, strict=True)]
    say(str(cluster))
    table(_table(rows, len(cluster.nodes)))
    return {
        "bench": "local",
        "machine": machine(cluster=records.encode(cluster)),
        "rows": rows,
        "targets": _targets(rows, len(cluster.nodes)),
    }


def _row(case: Case, found: Steps, predicted: Simulation) -> dict[str, Any]:
    measured_s = statistics.median(found.seconds)
    return {
        "model": case.model,
        "plan": case.strategy,
        "hidden": case.size.hidden,
        "measured_s": measured_s,
        "predicted_s": predicted.step_s,
        "error": predicted.step_s / measured_s - 1,
        "measured_bytes": found.sent_bytes,
        "predicted_bytes": predicted.between_nodes_bytes * FRAMES,
    }


def _targets(rows: Sequence[dict[str, Any]], nodes: int) -> list[dict[str, Any]]:
    where = f"{nodes} node{'s' * (nodes > 1)}"
    off = statistics.median(abs(row["error"]) for row in rows)
    found = [target(f"step time, {where}: median of |predicted / measured - 1|", off, STEP_LIMIT)]
    if nodes > 1:
        worst = max(abs(_bytes_error(row)) for row in rows)
        name = f"bytes between nodes, {where}: largest |predicted / counted - 1|"
        found.append(target(name, worst, BYTES_LIMIT))
    return found


def _bytes_error(row: dict[str, Any]) -> float:
    return float(row["predicted_bytes"] / row["measured_bytes"] - 1)


def _table(rows: Sequence[dict[str, Any]], nodes: int) -> Table:
    shown = Table(title="a training step, predicted from the measured cluster and measured")
    for column in ("model", "plan"):
        shown.add_column(column)
    for column in ("hidden", "measured ms", "predicted ms", "off", *(("counted MB", "predicted MB", "off") if nodes > 1 else ())):
        shown.add_column(column, justify="right")
    for row in rows:
        cells = [row["model"], row["plan"], str(row["hidden"]), f"{1e3 * row['measured_s']:.0f}", f"{1e3 * row['predicted_s']:.0f}"]
        cells.append(f"{row['error']:+.0%}")
        if nodes > 1:
            cells += [f"{row['measured_bytes'] / 1e6:.2f}", f"{row['predicted_bytes'] / 1e6:.2f}", f"{_bytes_error(row):+.1%}"]
        shown.add_row(*cells)
    return shown

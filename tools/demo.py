"""``make demo``: a small Llama from its Hugging Face config, compiled for 4 processes, trained, proven equal to the model, and drawn."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from rich.table import Table

from hgc import compiler
from hgc.backends import parity, torchrun
from hgc.cluster import Cluster
from hgc.errors import ArtifactError, HgcError
from hgc.tools import models
from hgc.tools.console import heading, say, table

EXAMPLES = Path(__file__).parents[1] / "examples"
CONFIG = EXAMPLES / "llama.json"
PLAN, DEVICES, STEPS = "dp2 tp2", 4, 20
T = TypeVar("T")


@dataclass(frozen=True)
class Row:
    """A line of the closing table."""

    step: str
    result: str
    seconds: float


def main(arguments: list[str]) -> int:
    """Run the demo into the folder given (default ``out``); returns the exit code."""
    folder = Path(arguments[0] if arguments else "out")
    try:
        rows, ok = run(folder)
    except HgcError as failed:
        print(f"hgc: {failed}", file=sys.stderr)
        return 1
    heading("Demo")
    table(_summary(rows))
    _next(folder)
    return 0 if ok else 1


def run(folder: Path, steps: int = STEPS) -> tuple[list[Row], bool]:
    """Every step of the demo: what was done and whether the program equals the model."""
    say(f"compiling {CONFIG.name} for {DEVICES} processes, plan {PLAN!r}")
    executable, compile_s = _timed(lambda: _compile(folder))
    program = executable.program
    blocks = len(list(program.blocks()))
    compiled = f"{blocks} blocks, {len(program.bodies)} distinct -> {_lines(folder / 'program.py')} lines of program.py"
    say(f"training it for {steps} steps with torchrun, on sequences that count (examples/counting.py)")
    losses, train_s = _timed(lambda: _train(folder, steps))
    say("comparing it with the model: loss, every gradient, weights after 10 optimizer steps")
    report, verify_s = _timed(lambda: parity.verify(folder))
    say("drawing it")
    picture, draw_s = _timed(lambda: _draw(executable, folder))
    rows = [
        Row("compile", compiled, compile_s),
        Row(f"train {steps} steps", losses, train_s),
        Row("verify", _verdict(report), verify_s),
        Row("draw", picture, draw_s),
    ]
    return rows, report.ok


def _compile(folder: Path) -> compiler.Executable:
    model, inputs = models.load(f"hf:{CONFIG}", batch_size=8, sequence_length=64)
    executable = compiler.compile(model, inputs, cluster=Cluster.local(DEVICES), plan=PLAN)
    executable.save(folder)
    return executable


def _train(folder: Path, steps: int) -> str:
    """Run the emitted program as a user would and show what it prints; returns the first and the last loss."""
    options = ["--steps", str(steps), "--lr", "1e-3", "--log-every", "5", "--data", "counting:batches"]
    command = torchrun.local_command(DEVICES, [str(folder / "program.py"), *options])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(EXAMPLES), *sys.path])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line.rstrip())
        say(f"  {line.rstrip()}")
    if process.wait() != 0:
        raise ArtifactError(f"the compiled program ended with exit code {process.returncode}; its messages are above")
    losses = [float(found[1]) for line in said if (found := re.search(r"loss:\s*([\d.]+)", line))]
    return f"loss {losses[0]:.2f} -> {losses[-1]:.2f}" if losses else "done"


def _verdict(report: parity.Report) -> str:
    word = "equal to the model on one process" if report.ok else "DIFFERENT from the model"
    parts = "\n".join(f"{found.value:.0e}  {found.what}" for found in report.differences)
    return f"{word}; largest relative differences (limit {report.limit:.0e}):\n{parts}"


def _draw(executable: compiler.Executable, folder: Path) -> str:
    bodies = executable.program.bodies
    most_used = max(bodies, key=lambda name: sum(block.body == name for block in executable.program.blocks()))
    executable.draw(folder / "layer.svg", open_body=most_used)
    return ", ".join(name for name in ("graph.svg", "layer.svg", "graph.dot", "layer.dot") if (folder / name).exists())


def _timed(work: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    return work(), time.perf_counter() - start


def _lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _summary(rows: list[Row]) -> Table:
    summary = Table(show_edge=False, pad_edge=False)
    for column in ("step", "result"):
        summary.add_column(column, overflow="fold")
    summary.add_column("seconds", justify="right")
    for row in rows:
        summary.add_row(row.step, row.result, f"{row.seconds:.1f}")
    return summary


def _next(folder: Path) -> None:
    heading("Look at")
    picture = next((name for name in ("graph.svg", "graph.dot") if (folder / name).exists()), "")
    layer = next((name for name in ("layer.svg", "layer.dot") if (folder / name).exists()), "")
    say(f"  {folder / 'program.py'}    the program, to read")
    say(f"  {folder / picture}     the model as blocks;  {folder / layer}  one layer opened: placements and communication")
    say(f"  hgc compile hf:{os.path.relpath(CONFIG)} --devices 4 --plan 'dp4 zero3' -o out2    another plan (.venv/bin/hgc)")
    say("  README.md    the same from Python, and for your own model")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

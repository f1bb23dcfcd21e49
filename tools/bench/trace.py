"""``hgc bench trace``: what tracing captures, how fast, in how much memory, and whether the program computes what the model computes.

Each family of the zoo is traced in a process of its own (forked, so that peak memory is its own), at a small size with real
weights. The program then runs at the traced batch and sequence size and at two others, against the eager model. The last row is
a Llama of 70 billion parameters, traced only.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from hgc.errors import HgcError
from hgc.tools.bench.machine import machine
from hgc.tools.bench.targets import target
from hgc.tools.bench.trace_parity import compare
from hgc.tools.bench.zoo import ZooEntry, entries
from hgc.tools.console import say, table
from hgc.tracing import empty_weights, trace

PARITY_LIMIT, REFUSED_LIMIT = 1e-5, 2
CPU_LIMIT_S, MEMORY_LIMIT_BYTES = 6.0, 2e9
LARGE = "Llama, 80 layers, hidden 8192"
_TIMEOUT_S = 600.0

Row = dict[str, Any]


def run(json_path: str | None = None) -> dict[str, Any]:
    """Trace the whole zoo, print the table, and return what JSON should hold (written to ``json_path`` too, if given)."""
    import transformers

    transformers.logging.set_verbosity_error()
    rows = []
    for entry in entries():
        rows.append(in_own_process(entry.name, lambda entry=entry: measure(entry)))  # type: ignore[misc]
        say(f"{entry.name}: {rows[-1].get('cpu_s', 0.0):.1f} s of CPU time", style="dim")
    rows.append(in_own_process(LARGE, measure_large))
    result = {"bench": "trace", "machine": machine(), "rows": rows, "targets": _targets(rows)}
    table(_table(rows))
    for row in rows:
        if not row["traced"]:
            say(f"{row['model']}: {row.get('refused') or row.get('failed')}")
    targets: Any = result["targets"]
    for each in targets:
        say(f"{'holds' if each['holds'] else 'FAILS'}: {each['name']}: {each['value']:.3g} (limit {each['limit']:.3g})")
    if json_path is not None:
        Path(json_path).write_text(json.dumps(result, indent=1), encoding="utf-8")
    return result


def measure(entry: ZooEntry) -> Row:
    """Trace one family and compare program and model at three sizes, fewer where tracing fixed a size."""
    torch.manual_seed(0)
    model = entry.build("small")
    sizes = [(4, entry.minimum + 8 * entry.step), (3, entry.minimum + 3 * entry.step), (5, entry.minimum + 13 * entry.step)]
    batch = entry.batch(*sizes[0])
    row: Row = {"model": entry.name, "parameters": sum(p.numel() for p in model.parameters())}
    started = time.process_time()
    try:
        program = trace(model, batch, loss=entry.loss)
    except HgcError as refused:
        return {**row, "traced": False, "refused": str(refused), "cpu_s": time.process_time() - started}
    row |= {"traced": True, "cpu_s": time.process_time() - started, "peak_bytes": _peak_bytes(), "report": program.report}
    row |= {"blocks": dict(Counter(block.body for block in program.blocks())), "symbols": [str(s) for s in program.symbols]}
    differences = []
    for number, (b, s) in enumerate(sizes):
        if number == 0 or _is_symbolic(row, entry):
            differences.append(compare(model, program, entry.batch(b, s), entry.loss, seed=number))
    worst = max(differences, key=lambda difference: difference.worst)
    return {**row, "sizes": len(differences), "loss_error": worst.loss, "gradient_error": worst.gradient, "parameter": worst.parameter}


def _is_symbolic(row: Row, entry: ZooEntry) -> bool:
    return "b" in row["symbols"] and ("s" in row["symbols"] or not entry.sequence)


def measure_large() -> Row:
    """A 70B Llama on meta: CPU time and peak memory of tracing alone, imports and model construction not counted in the time."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    )
    with empty_weights():
        model: nn.Module = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(2, 4096, dtype=torch.int64)
    started = time.process_time()
    program = trace(model, {"input_ids": ids, "labels": ids})
    cpu_s = time.process_time() - started
    row: Row = {"model": LARGE, "parameters": sum(p.numel() for p in model.parameters()), "traced": True, "cpu_s": cpu_s}
    row |= {"peak_bytes": _peak_bytes(), "blocks": dict(Counter(block.body for block in program.blocks())), "report": program.report}
    return {**row, "symbols": [str(symbol) for symbol in program.symbols]}


def in_own_process(name: str, work: Callable[[], Row]) -> Row:
    """Run ``work`` in a fork; a crash or a hang becomes a row that says so."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(work, sender))
    process.start()
    sender.close()
    try:
        row = receiver.recv() if receiver.poll(_TIMEOUT_S) else {"failed": f"no result after {_TIMEOUT_S:.0f} s"}
    except EOFError:
        row = {"failed": "the process died"}
    process.kill()
    process.join()
    return {"model": name, "traced": False, **row}


def _send(work: Callable[[], Row], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send(work())
    except Exception as error:
        sender.send({"failed": f"{type(error).__name__}: {error}"[:300]})


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _holds(row: Row) -> bool:
    return "loss_error" in row and max(row["loss_error"], row["gradient_error"]) <= PARITY_LIMIT


def _targets(rows: list[Row]) -> list[dict[str, Any]]:
    zoo = [row for row in rows if row["model"] != LARGE]
    (large,) = (row for row in rows if row["model"] == LARGE)
    missing = sum(1 for row in zoo if not _holds(row))
    crashed = sum(1 for row in zoo if "failed" in row)
    unknown = float("inf")
    values = [
        (f"families of {len(zoo)} not traced with parity at {PARITY_LIMIT:g}", float(missing), float(REFUSED_LIMIT)),
        ("families that fail other than with one sentence", float(crashed), 0.0),
        ("CPU seconds to trace a Llama with 80 layers and hidden size 8192", float(large.get("cpu_s", unknown)), CPU_LIMIT_S),
        ("bytes of peak memory for it", float(large.get("peak_bytes", unknown)), MEMORY_LIMIT_BYTES),
    ]
    return [target(name, value, limit) for name, value, limit in values]


def _table(rows: list[Row]) -> Table:
    result = Table("model", "blocks by kind", "sizes", "CPU s", "peak MB", "loss", "gradients", title="hgc bench trace")
    for row in rows:
        if not row["traced"]:
            result.add_row(
                row["model"], row.get("refused") or row.get("failed"), "", "", "", "refused" if "refused" in row else "failed", ""
            )
            continue
        blocks = ", ".join(f"{count} {name}" if count > 1 else name for name, count in row["blocks"].items())
        errors = [f"{row[key]:.0e}" if key in row else "" for key in ("loss_error", "gradient_error")]
        result.add_row(row["model"], blocks, " ".join(row["symbols"]), f"{row['cpu_s']:.2f}", f"{row['peak_bytes'] / 1e6:.0f}", *errors)
    return result

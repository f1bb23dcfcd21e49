"""``python -m hgc.tools.gpu_check``: whatever one GPU can show in less than 8 minutes; see docs/gpu.md.

An emitted Llama program against the model itself, eager and compiled: step time, model FLOP/s utilisation, memory; and both against
what the simulator predicts for the card, from its data sheet and from measurements of its kernels.
"""

from __future__ import annotations

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from hgc import compiler, records
from hgc.backends.parity.verify import last_error
from hgc.backends.simulator import Options
from hgc.cluster import Cluster
from hgc.cost.execution import EAGER as AS_IT_STANDS
from hgc.cost.execution import Execution
from hgc.errors import ArtifactError, HgcError
from hgc.plan import Plan, Precision
from hgc.strategy import Strategy
from hgc.tools.console import say, stage, table
from hgc.tools.gpu_check_worker import EAGER, PROGRAM, PROGRAM_COMPILED, TINY, VARIANTS, Job, LlamaSize, Result, batch, llama
from hgc.tools.profile.launch import launch
from hgc.tools.simulate import find_cluster
from hgc.tracing import empty_weights

LIMIT_S, LONGEST_S = 460.0, 150.0
"""Of the whole check; of one variant."""
CARDS = (
    *(("GB300", "gb300"), ("GB200", "gb200"), ("B300", "b300"), ("B200", "b200"), ("H200", "h200"), ("H800", "h800"), ("H100", "h100")),
    *(("A100-SXM4-80GB", "a100-80"), ("A100 80GB", "a100-80"), ("A100", "a100-40"), ("A800", "a800")),
    *(("V100-SXM2-32GB", "v100-32"), ("V100", "v100-16"), ("RTX 4090", "rtx4090")),
)
"""Part of a card's name as its driver gives it -> preset; the first that fits."""
RATIO_LIMIT, LOSS_LIMIT = 1.05, 0.01


@dataclass(frozen=True)
class Predicted:
    """What the simulator says of a variant; ``basis`` is the cluster that it rests on. ``memory_bytes``: of tensors, as it is measured."""

    variant: str
    basis: str
    step_s: float
    memory_bytes: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; exit code 0, 1 if a variant failed, or 2 if there is nothing to run on or an option is wrong."""
    request = _parser().parse_args(arguments)
    if request.device == "cuda" and not torch.cuda.is_available():
        message = "this check needs a GPU, and torch sees none here; run it on a machine that has one, or try it with --device cpu --tiny"
        print(f"hgc: {message}", file=sys.stderr)
        return 2
    try:
        report = check(request)
        if request.json:
            records.write_text(request.json, records.to_text(report), "report", ArtifactError)
    except HgcError as mistake:
        print(f"hgc: {mistake}", file=sys.stderr)
        return 2
    return 1 if report["failed"] else 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="hgc.tools.gpu_check", description="Compare a program with its model on one device.")
    made.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    made.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters, to see that the check runs")
    made.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="what to run")
    made.add_argument("--cluster", default=None, metavar="NAME", help="preset or cluster file to predict from (default: the card's preset)")
    made.add_argument("--no-profile", action="store_true", help="predict from the preset only, without measuring kernels")
    made.add_argument("--rows", type=int, default=None, help="of the batch")
    made.add_argument("--json", default=None, metavar="FILE", help="write the report there")
    return made


def check(request: argparse.Namespace) -> dict[str, Any]:
    """Everything that the options ask for: prints the table, returns what JSON should hold."""
    deadline_s = time.monotonic() + LIMIT_S
    size = TINY if request.tiny else LlamaSize()
    if request.rows is not None:
        records.check_whole("--rows", request.rows, 1, HgcError)
        size = LlamaSize(**{**vars(size), "rows": request.rows})
    with tempfile.TemporaryDirectory(prefix="hgc-gpu-") as folder:
        with stage("compile"):
            executable = _compile(size)
            executable.save(Path(folder) / "program")
        clusters = _clusters(request, Path(folder))
        with stage("predict"):
            predictions = [found for name in request.variants for cluster in clusters for found in _predict(executable, name, cluster)]
        rows: list[Result] = []
        failed: dict[str, str] = {}
        for variant in request.variants:
            job = Job(variant, size, request.device, str(Path(folder) / "program"), warmup=3, steps=3 if request.tiny else 8)
            with stage(variant):
                try:
                    rows.append(_run(job, Path(folder), min(LONGEST_S, deadline_s - time.monotonic())))
                except HgcError as reason:
                    failed[variant] = str(reason)
    peak = clusters[0].nodes[0].device.bfloat16_flops_per_s
    shown = _rows(rows, peak, clusters[0].name)
    table(_table(shown, predictions))
    for variant, reason_text in failed.items():
        say(f"{variant}: {reason_text}", style="red")
    report = {"check": "gpu", "machine": _machine(rows), "size": records.encode(size), "rows": shown}
    targets = _targets({row.variant: row for row in rows})
    for target in targets:
        say(f"{'holds' if target['holds'] else 'FAILS'}: {target['name']}: {target['value']:.3g} (limit {target['limit']:.3g})")
    return {**report, "predictions": [records.encode(found) for found in predictions], "targets": targets, "failed": failed}


def _compile(size: LlamaSize) -> compiler.Executable:
    """For one device, computing in bfloat16 with parameters in float32; without the model's memory."""
    with empty_weights():
        model = llama(size)
    plan = Plan(Strategy(), precision=Precision(compute="bfloat16", parameters="float32"))
    return compiler.compile(model, batch(size), plan=plan)


def _clusters(request: argparse.Namespace, folder: Path) -> list[Cluster]:
    """What to predict from: the preset, and what ``hgc profile`` measures here. Raises ``ClusterError``."""
    found = []
    name = request.cluster or (_preset(torch.cuda.get_device_name()) if request.device == "cuda" else "cpu")
    if name is not None:
        found.append(find_cluster(name))
    if not request.no_profile or not found:
        path = folder / "cluster.json"
        with stage("profile"):
            code = launch(str(path), 1)
        if code:
            raise ArtifactError(f"measuring this machine's kernels ended with code {code}; leave it out with --no-profile --cluster NAME")
        found.append(Cluster.load(path))
    return found


def _preset(card: str) -> str | None:
    return next((preset for part, preset in CARDS if part in card), None)


def _predict(executable: compiler.Executable, variant: str, cluster: Cluster) -> list[Predicted]:
    """Of emitted programs; those of compiled blocks as if their elementwise operators were fused."""
    executions = {PROGRAM: AS_IT_STANDS, PROGRAM_COMPILED: Execution(fused=True)}
    if variant not in executions:
        return []
    found = executable.simulate(cluster, options=Options(optimizer="adamw", execution=executions[variant]))
    return [Predicted(variant, cluster.name, found.step_s, found.fullest.tensors)]


def _run(job: Job, folder: Path, limit_s: float) -> Result:
    """In a process of its own. Raises ``ArtifactError`` if it fails or takes too long."""
    if limit_s <= 0:
        raise ArtifactError(f"not run, because the others took the {LIMIT_S:.0f} s that the check may take; give fewer --variants")
    given, made = folder / "job.json", folder / "result.json"
    made.unlink(missing_ok=True)
    given.write_text(records.to_text(records.encode(job)), encoding="utf-8")
    command = [sys.executable, "-m", "hgc.tools.gpu_check_worker", str(given), str(made)]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if job.device == "cpu" else {}
    try:
        done = subprocess.run(command, env={**os.environ, **hidden}, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"took more than {limit_s:.0f} s; give fewer --rows") from None
    if done.returncode != 0:
        raise ArtifactError(f"failed: {last_error(done.stderr)}")
    text = records.read_text(made, "result", ArtifactError)
    return records.decode(Result, records.parse_json(text, "the result", ArtifactError), "the result", ArtifactError)


def _rows(rows: Sequence[Result], peak_flops_per_s: float, peak_of: str) -> list[dict[str, Any]]:
    """With utilisation, where the eager variant has counted the FLOPs of a step."""
    flops = max((row.flops for row in rows), default=0)
    return [
        {
            **records.encode(row),
            "flops": flops,
            "mfu": flops / row.step_s / peak_flops_per_s if flops else None,
            "peak_flops_per_s": peak_flops_per_s,
            "peak_of": peak_of,
        }
        for row in rows
    ]


def _table(rows: Sequence[dict[str, Any]], predictions: Sequence[Predicted]) -> Table:
    shown = Table("", title="a training step in bfloat16, AdamW included")
    for column in ("ms", "of eager", "MFU", "GiB", "loss", "predicted ms", "off", "predicted GiB", "off", "predicted from"):
        shown.add_column(column, justify="right")
    eager_s = next((row["step_s"] for row in rows if row["variant"] == EAGER), None)
    for row in rows:
        ratio = "" if eager_s is None else f"{row['step_s'] / eager_s:.2f}"
        used = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
        cells = [row["variant"], f"{1e3 * row['step_s']:.1f}", ratio, used, f"{row['memory_bytes'] / 2**30:.2f}", f"{row['loss']:.3f}"]
        own = [found for found in predictions if found.variant == row["variant"]]
        for index, found in enumerate(own):
            off_s, off_bytes = found.step_s / row["step_s"] - 1, found.memory_bytes / max(row["memory_bytes"], 1) - 1
            said = [f"{1e3 * found.step_s:.1f}", f"{off_s:+.0%}", f"{found.memory_bytes / 2**30:.2f}", f"{off_bytes:+.0%}", found.basis]
            shown.add_row(*(cells if index == 0 else [""] * len(cells)), *said)
        if not own:
            shown.add_row(*cells)
    return shown


def _targets(rows: dict[str, Result]) -> list[dict[str, Any]]:
    """The emitted program is as fast as the model, and computes the same."""
    found = []
    if {EAGER, PROGRAM} <= rows.keys():
        ratio = rows[PROGRAM].step_s / rows[EAGER].step_s
        found.append({"name": "step time, hgc / eager", "value": ratio, "limit": RATIO_LIMIT, "holds": ratio <= RATIO_LIMIT})
    if len(rows) > 1:
        losses = [row.loss for row in rows.values()]
        apart = max(losses) / min(losses) - 1
        found.append({"name": "first losses, largest / smallest - 1", "value": apart, "limit": LOSS_LIMIT, "holds": apart <= LOSS_LIMIT})
    return found


def _machine(rows: Sequence[Result]) -> dict[str, Any]:
    return {
        "device": rows[0].device if rows else "",
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "load_average": os.getloadavg()[0],
    }


if __name__ == "__main__":
    sys.exit(main())

"""``verify``: the emitted program on local gloo processes against the unmodified model in one."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from hgc.backends import torchrun
from hgc.backends.parity import reference as single
from hgc.backends.parity.case import Case, Outcome, Reference, to_dtype, without_dropout
from hgc.backends.parity.compare import Report, compare
from hgc.backends.parity.threads import run_ranks
from hgc.backends.parity.worker import CASE, OUTCOME, run_rank
from hgc.errors import ArtifactError
from hgc.plan import Plan, Precision
from hgc.runtime.precision import read_precision


def verify(
    directory: str | Path,
    *,
    model: nn.Module | None = None,
    reference: Reference | None = None,
    dtype: torch.dtype = torch.float32,
    steps: int = 10,
    seed: int = 0,
    optimizer: str = "sgd",
    ranks: Literal["processes", "threads"] = "processes",
    timeout_s: float = 600.0,
    precision: Precision | None = None,
) -> Report:
    """Compare loss, every gradient and the weights after ``steps`` optimizer steps.

    Args:
        directory: a saved executable.
        model: the model, where the executable could not store it; its weights are used if it has any.
        reference: what to compare with, instead of the one stored in the folder.
        dtype: float32 (limit 1e-5) or float64 (limit 1e-10).
        ranks: gloo processes, or threads of this process: about twenty times quicker, the same numbers.
        precision: with it both sides run under the same autocast. In bfloat16 the limit is 1e-1, or four times the model's own error.

    Raises ArtifactError if the folder is no executable, or if a process of the emitted program fails.
    """
    directory = Path(directory)
    plan = _plan(directory)
    stored = reference or single.load(directory)
    if model is not None:
        stored = replace(stored, model=model)
    case = replace(make_case(stored, dtype, steps, seed, optimizer), precision=precision)
    stored = replace(stored, model=single.without_weights(stored.model))
    expected = single.run(stored, case)
    truth = None if dtype == torch.float64 else single.run(stored, in_float64(case))
    found = RANKS[ranks](directory, case, plan.devices, timeout_s)
    computed = read_precision(precision or Precision()).autocast or dtype
    true = (truth.gradients, truth.state) if truth else (None, None)
    return compare(expected, found, computed, plan.devices, _in_words(plan), *true)


def _in_words(plan: Plan) -> str:
    strategies = ", ".join(dict.fromkeys(map(str, plan.strategies)))
    return f"{len(plan.stages)} stages of {strategies} in {plan.schedule}" if plan.stages else strategies


def in_float64(case: Case) -> Case:
    return replace(case, state=to_dtype(case.state, torch.float64), dtype=torch.float64, precision=None)


def first_step_in_float64(case: Case) -> Case:
    return replace(in_float64(case), batches=case.batches[:1])


def _plan(directory: Path) -> Plan:
    if not (directory / "plan.json").exists():
        raise ArtifactError(f"{directory} is no saved executable: it has no plan.json; make one with hgc compile ... -o {directory}")
    return Plan.load(directory / "plan.json")


def make_case(stored: Reference, dtype: torch.dtype, steps: int, seed: int, optimizer: str = "sgd") -> Case:
    """Weights from the model or the seed; batches from the example, its rows rotated from step to step."""
    state = single.materialise(stored.model, seed)
    converted = to_dtype(state, dtype)
    batches = [{name: _rotate(t, step) for name, t in stored.inputs.items()} for step in range(steps)]
    return Case(converted, batches, dtype, optimizer)


def _rotate(tensor: Tensor, step: int) -> Tensor:
    return tensor.roll(step, 0) if tensor.dim() else tensor


def _launch(directory: Path, case: Case, ranks: int, timeout_s: float) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="hgc-verify-") as folder:
        torch.save(case, Path(folder) / CASE)
        command = torchrun.local_command(ranks, ["-m", "hgc.backends.parity.worker", folder, str(directory.resolve())])
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ArtifactError(
                f"the emitted program did not finish {len(case.batches)} steps in {timeout_s:.0f} s; give timeout_s=..."
            ) from None
        if done.returncode != 0 or not (Path(folder) / OUTCOME).exists():
            raise ArtifactError(f"the emitted program failed on {ranks} processes: {last_error(done.stderr)}")
        outcome = torch.load(Path(folder) / OUTCOME, weights_only=False)
        assert isinstance(outcome, Outcome)
        return outcome


def on_threads(directory: Path, case: Case, ranks: int, timeout_s: float = 600.0, dropout: bool = False) -> Outcome:
    """Train the emitted program on threads of this process that play its ranks; what the first of them gives."""
    model, plan = torchrun.load_model(directory)
    with nullcontext() if dropout else without_dropout():
        return run_ranks(ranks, lambda rank: run_rank(model, plan, case), timeout_s)[0]


RANKS: Mapping[str, Callable[[Path, Case, int, float], Outcome]] = {"processes": _launch, "threads": on_threads}


def last_error(text: str) -> str:
    """The first exception line of a rank's output, which is the cause; torchrun's own summary follows it."""
    lines = [line.strip() for line in text.splitlines()]
    errors = [line.split("]:", 1)[-1].strip() for line in lines if "Error: " in line or "Error(" in line]
    return errors[0] if errors else (lines[-1] if lines else "no output")

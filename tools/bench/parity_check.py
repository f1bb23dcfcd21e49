"""One case of ``hgc bench parity``: traced, distributed, emitted, run on threads, compared."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hgc import compiler
from hgc.backends import parity, torchrun
from hgc.backends.parity.compare import Report, compare
from hgc.backends.parity.verify import make_case, on_threads
from hgc.errors import HgcError
from hgc.ir.input_sizes import input_sizes
from hgc.ir.program import Program
from hgc.passes.base import Pipeline
from hgc.passes.sharding.one_device_dropout import OneDeviceDropout
from hgc.plan import Plan
from hgc.simulation import sized
from hgc.tools.bench.parity_cases import PRECISIONS, ParityCase
from hgc.tracing import trace

STEPS = 3
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Outcome:
    """``kind`` is "equal", "refused" (with the sentence), "different" or "failed" (an error that is no refusal)."""

    kind: str
    what: str = ""
    worst: float = 0.0

    @property
    def bad(self) -> bool:
        return self.kind in ("different", "failed")


def check(case: ParityCase) -> Outcome:
    """Compile one case, run it on threads, and compare."""
    try:
        report = compare_case(case)
    except HgcError as refused:
        return Outcome("refused", str(refused))
    except Exception as error:  # whatever goes wrong is a finding, and the others shall still run
        return Outcome("failed", f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}")
    worst = max(report.differences, key=lambda difference: difference.value)
    return Outcome("equal" if report.ok else "different", "" if report.ok else f"{report}; worst at {worst.where}", worst.value)


@dataclass(frozen=True)
class _Subject:
    model: nn.Module
    loss: Callable[..., Tensor] | None
    program: Program


@lru_cache(maxsize=2)
def _traced(text: str) -> _Subject:
    """Cases of one group come one after the other."""
    case = ParityCase.parse(text)
    model, loss = case.build()
    return _Subject(model, loss, trace(model, case.make_batch(), loss=loss))


def compare_case(case: ParityCase) -> Report:
    """Raises :class:`HgcError` if the plan does not fit the model or the shapes."""
    subject = _traced(str(case.subject))
    batch = case.make_batch()
    program = _sized_for(subject.program, batch)
    plan = case.plan_for(len(list(program.blocks())))
    plan.validate()
    with tempfile.TemporaryDirectory(prefix="hgc-parity-") as folder:
        reference = parity.make(subject.model, batch, subject.loss)
        if case.dropout:
            return _compare_dropout(program, plan, reference, getattr(torch, case.dtype), Path(folder))
        return parity.verify(
            emitted(program, plan, Path(folder) / "program"),
            reference=reference,
            dtype=getattr(torch, case.dtype),
            steps=STEPS,
            ranks="threads",
            timeout_s=TIMEOUT_S,
            precision=PRECISIONS[case.precision] if case.precision else None,
        )


def _compare_dropout(program: Program, plan: Plan, reference: Any, dtype: torch.dtype, folder: Path) -> Report:
    """Against the same program for one device, both with the masks of one device."""
    keyed = compiler.default_pipeline().append(OneDeviceDropout())
    case = make_case(reference, dtype, STEPS, seed=0)
    alone = Plan(micro_batches=plan.micro_batches)
    expected, found = (
        on_threads(emitted(program, each, folder / name, keyed), case, each.devices, TIMEOUT_S, dropout=True)
        for name, each in (("alone", alone), ("program", plan))
    )
    return compare(expected, found, dtype, plan.devices, "with dropout")


def emitted(program: Program, plan: Plan, folder: Path, pipeline: Pipeline | None = None) -> Path:
    """Distribute a traced program and write it; returns the folder."""
    with torchrun.staged(folder) as staging:
        if plan.stages:
            torchrun.write(staging, program, plan, compiler.distribute_stages(program, plan, pipeline))
        else:
            torchrun.write(staging, compiler.distribute(program, plan, pipeline), plan)
    return folder


def _sized_for(program: Program, batch: dict[str, Any]) -> Program:
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    return sized(program, {symbol.name: size for symbol, size in input_sizes(program, tensors).items()})

"""Emitted programs with sequence axes against the unmodified models: loss, gradients, and weights after a few optimizer steps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import hgc
from hgc.backends import torchrun
from hgc.backends.parity import reference
from hgc.backends.parity.case import Case, Outcome
from hgc.backends.parity.compare import compare
from hgc.backends.parity.verify import first_step_in_float64, make_case, on_threads
from hgc.ir.program import Program
from hgc.plan import Stage
from tests.families import FAMILIES

STEPS = 3
STRATEGIES = ("sp4", "cp4", "cp2 sp2", "dp2 sp2 zero3", "cp2 zero2", "sp2 zero3", "dp2 cp2 zero3", "sp2 tp2", "cp2 tp2")


@cache
def expected(family: str) -> tuple[Program, dict[torch.dtype, tuple[Case, Outcome]], Any]:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    stored = reference.make(model, batch)
    cases = {dtype: make_case(stored, dtype, STEPS, seed=0) for dtype in (torch.float32, torch.float64)}
    truth = reference.run(stored, first_step_in_float64(cases[torch.float32])).gradients
    return hgc.trace(model, batch), {dtype: (case, reference.run(stored, case)) for dtype, case in cases.items()}, truth


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_emitted_program_equals_the_model(family: str, strategy: str, tmp_path: Path) -> None:
    """1e-5 in float32, 1e-10 in float64."""
    program, runs, truth = expected(family)
    plan = hgc.Plan(hgc.Strategy.parse(strategy))
    folder = tmp_path / "out"
    with torchrun.staged(folder) as staging:
        torchrun.write(staging, hgc.distribute(program, plan), plan)
    for dtype, (case, right) in runs.items():
        found = on_threads(folder, case, plan.devices)
        report = compare(right, found, dtype, plan.devices, strategy, truth if dtype == torch.float32 else None)
        assert report.ok, f"{dtype}: {report}; worst at {[d.where for d in report.differences]}"


ring, ulysses = hgc.Strategy(cp=2), hgc.Strategy(sp=2)
STAGES = hgc.Plan(ring, stages=(Stage(blocks=2, first_rank=0), Stage(blocks=3, first_rank=2, strategy=ulysses)), micro_batches=2)


@pytest.mark.distributed
@pytest.mark.parametrize("plan", ["cp2 sp2", STAGES], ids=["cp2 sp2", "a ring, then Ulysses"])
def test_processes_agree_with_the_model(plan: str | hgc.Plan) -> None:
    """One stage hands its positions in zigzag order to one that has them in their own."""
    model, batch = FAMILIES["llama"]()
    assert hgc.compile(model, batch, plan=plan).verify(dtype=torch.float64).ok

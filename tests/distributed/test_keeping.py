"""What a rank keeps does not change what is computed: recomputation, ZeRO 1 to 3 and micro-batches against the unmodified model."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hgc
from hgc import runtime
from hgc.backends import torchrun
from hgc.backends.parity import reference
from hgc.backends.parity.case import Case, Outcome, Reference, make_optimizer, without_dropout
from hgc.backends.parity.compare import compare
from hgc.backends.parity.threads import run_ranks
from hgc.backends.parity.verify import first_step_in_float64, make_case, on_threads
from hgc.ir.program import Program
from hgc.plan import Precision
from tests.families import FAMILIES

STEPS = 3
PLANS = {
    "recompute": [
        "recompute",
        "recompute-selective",
        "tp2 recompute",
        "tp2 recompute-selective",
        "dp2 recompute",
        "dp2 zero3 recompute",
        "dp2 zero3 recompute-selective",
    ],
    "zero": ["dp2 zero1", "dp2 zero2", "dp2 zero3", "dp4 zero1", "dp4 zero2", "dp2 tp2 zero1", "dp2 tp2 zero2", "dp2 tp2 zero3 recompute"],
    "micro-batches": ["micro2", "dp2 micro2", "dp2 zero1 micro2", "dp2 zero2 micro2", "dp2 zero3 recompute micro2"],
}


def plan_of(text: str) -> hgc.Plan:
    words = text.replace("micro2", "").strip()
    return hgc.Plan(hgc.Strategy.parse(words or "dp1"), micro_batches=2 if "micro2" in text else 1)


@cache
def expected(family: str) -> tuple[Program, dict[torch.dtype, tuple[Case, Outcome]], Outcome]:
    """The traced program, cases and outcomes of one device in both dtypes, and the first step of float32 in float64."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    stored: Reference = reference.make(model, batch)
    cases = {dtype: make_case(stored, dtype, STEPS, seed=0) for dtype in (torch.float32, torch.float64)}
    outcomes = {dtype: (case, reference.run(stored, case)) for dtype, case in cases.items()}
    return hgc.trace(model, batch), outcomes, reference.run(stored, first_step_in_float64(cases[torch.float32]))


def save(folder: Path, program: Program, plan: hgc.Plan) -> Path:
    with torchrun.staged(folder) as staging:
        torchrun.write(staging, hgc.distribute(program, plan), plan)
    return folder


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_loss_gradients_and_weights_equal_the_model(family: str, kind: str, tmp_path: Path) -> None:
    """After several optimizer steps: 1e-5 in float32, 1e-10 in float64."""
    program, outcomes, truth = expected(family)
    for text in PLANS[kind][:: 3 if family == "t5" else 1]:  # a T5 takes long
        plan = plan_of(text)
        folder = save(tmp_path / text.replace(" ", "-"), program, plan)
        for dtype, (case, outcome) in outcomes.items():
            found = on_threads(folder, case, plan.devices)
            report = compare(outcome, found, dtype, plan.devices, text, truth.gradients if dtype == torch.float32 else None)
            assert report.ok, f"{text} {dtype}: {report}; worst at {[d.where for d in report.differences]}"


def distance(found: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> float:
    """Mean relative distance of tensors."""
    names = [name for name, tensor in truth.items() if tensor.is_floating_point() and tensor.norm() > 1e-6]
    return sum(float((found[name].double() - truth[name]).norm() / truth[name].norm()) for name in names) / len(names)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_mixed_precision_is_nearer_to_the_truth_than_plain_bfloat16(family: str, tmp_path: Path) -> None:
    """After three steps, against float64 on one device."""
    program, outcomes, _ = expected(family)
    case, truth = outcomes[torch.float64]

    def train(name: str, strategy: str, precision: Precision) -> Outcome:
        plan = hgc.Plan(hgc.Strategy.parse(strategy), precision=precision)
        model, info = torchrun.load_model(save(tmp_path / name, program, plan))
        with without_dropout():
            return run_ranks(2, lambda rank: run_steps(runtime.Trainer(model, info, state=case.state, device="cpu"), case))[0]

    plain = train("plain", "dp2", Precision(parameters="bfloat16"))
    mixed = train("mixed", "dp2 zero2 recompute", Precision("bfloat16", "bfloat16", master="float32", gradients="float32"))
    autocast = train("autocast", "dp2 zero3 recompute-selective", Precision("bfloat16", "float32"))
    for found in (mixed, autocast):
        assert found.losses == pytest.approx(truth.losses, rel=2e-3)
        assert distance(found.gradients, truth.gradients) < 0.02
        assert distance(found.state, truth.state) < 0.7 * distance(plain.state, truth.state)
    assert distance(plain.state, truth.state) < 0.02


def run_steps(trainer: runtime.Trainer, case: Case) -> Outcome:
    optimizer = make_optimizer(case, list(trainer.parameters()))
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for batch in case.batches:
        losses.append(float(trainer.step(batch)))
        gradients = gradients or {name: g.clone() for name, g in trainer.full_gradients().items() if g is not None}
        optimizer.step()
        optimizer.zero_grad()
    return Outcome(losses, gradients, trainer.full_state_dict())


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "text"), [("llama", "dp2 tp2 zero2 recompute"), ("gpt2", "dp2 zero3 recompute-selective micro2")])
def test_processes_agree_with_the_model(family: str, text: str) -> None:
    model, batch = FAMILIES[family]()
    assert hgc.compile(model, batch, plan=plan_of(text)).verify(steps=3).ok

"""Emitted programs against the unmodified model: ranks as threads for every family and strategy, real processes for some."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hgc
from hgc.backends import torchrun
from hgc.backends.parity import reference
from hgc.backends.parity.case import Outcome
from hgc.backends.parity.compare import compare
from hgc.backends.parity.verify import first_step_in_float64, make_case, on_threads
from tests.families import FAMILIES, STRATEGIES

STEPS = 10


@pytest.mark.parametrize("family", FAMILIES)
def test_emitted_program_equals_the_model(family: str, tmp_path: Path) -> None:
    """Loss, every gradient, and weights and buffers after 10 optimizer steps: 1e-5 in float32, 1e-10 in float64."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    stored = reference.make(model, batch)
    program = hgc.trace(model, batch)
    cases = {dtype: make_case(stored, dtype, STEPS, seed=0) for dtype in (torch.float32, torch.float64)}
    expected = {dtype: reference.run(stored, case) for dtype, case in cases.items()}
    truth = reference.run(stored, first_step_in_float64(cases[torch.float32])).gradients
    for strategy in STRATEGIES:
        plan = hgc.Plan(hgc.Strategy.parse(strategy))
        folder = tmp_path / strategy.replace(" ", "-")
        with torchrun.staged(folder) as staging:
            torchrun.write(staging, hgc.distribute(program, plan), plan)
        for dtype, case in cases.items():
            found = on_threads(folder, case, plan.devices)
            report = compare(expected[dtype], found, dtype, plan.devices, strategy, truth if dtype == torch.float32 else None)
            assert report.ok, f"{strategy} {dtype}: {report}; worst at {[d.where for d in report.differences]}"


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "strategy"), [("llama", "dp2 tp2"), ("gpt2", "dp4 zero3")])
def test_processes_agree_with_the_model(family: str, strategy: str, tmp_path: Path) -> None:
    model, batch = FAMILIES[family]()
    executable = hgc.compile(model, batch, plan=strategy)
    executable.save(tmp_path / "out")
    assert hgc.verify(tmp_path / "out").ok


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_processes_agree_with_the_model_everywhere(family: str, strategy: str) -> None:
    model, batch = FAMILIES[family]()
    executable = hgc.compile(model, batch, plan=strategy)
    for dtype in (torch.float32, torch.float64):
        assert executable.verify(dtype=dtype).ok


def test_a_difference_is_found() -> None:
    """The check can fail: a reference that is off by a thousandth is reported with the loss as the place."""
    model, batch = FAMILIES["llama"]()
    case = make_case(reference.make(model, batch), torch.float32, 1, seed=0)
    right = reference.run(reference.make(model, batch), case)
    wrong = Outcome([right.losses[0] * 1.001], {n: g * 1.001 for n, g in right.gradients.items()}, right.state)
    report = compare(right, wrong, torch.float32, 1, "dp1")
    assert not report.ok
    assert {d.what for d in report.differences if d.value > report.limit} == {"loss", "losses of all steps", "gradients"}
    lost = Outcome(right.losses, {}, right.state)
    assert compare(right, lost, torch.float32, 1, "dp1").missing


class _Scores(torch.nn.Module):
    """Gives scores and leaves the loss to its user."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def _loss_of_batch(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output, batch["labels"])


def test_a_loss_of_output_and_batch(tmp_path: Path) -> None:
    batch = {"x": torch.randn(4, 8), "labels": torch.arange(4)}
    executable = hgc.compile(_Scores(), batch, plan="dp2", loss=_loss_of_batch)
    assert hgc.verify(executable.save(tmp_path / "out"), ranks="threads").ok

"""Dropout with the masks of one device: the same loss and gradients under every plan, with dropout on."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from hgc.backends.parity.case import precision, to_dtype, without_dropout
from hgc.backends.torchrun import emit
from hgc.compiler import default_pipeline, distribute
from hgc.ir.program import Program
from hgc.passes.sharding.one_device_dropout import OneDeviceDropout
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tracing import trace
from tests.distributed.lowered import run_lowered
from tests.families import FAMILIES

PLANS = ("dp4", "tp2", "tp4 no-sequence-parallel", "sp4", "cp4", "cp2 sp2", "dp2 tp2", "sp2 tp2", "cp2 tp2")


@cache
def traced(family: str) -> tuple[Program, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    program = trace(model, batch)
    return program, {n: t.detach().double() if t.is_floating_point() else t for n, t in model.state_dict().items()}, batch


def run(family: str, plan: str, keyed: bool = True) -> tuple[Tensor, dict[str, Tensor]]:
    program, state, batch = traced(family)
    pipeline = default_pipeline().append(OneDeviceDropout()) if keyed else default_pipeline()
    with precision(torch.float64):
        return run_lowered(distribute(program, Plan(Strategy.parse(plan)), pipeline), to_dtype(batch, torch.float64), state)


@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_every_plan_draws_the_masks_of_one_device(family: str) -> None:
    """Embeddings, residuals and attention weights are dropped, whole, by heads, by rows, in zigzag order and flattened."""
    loss, gradients = run(family, "dp1")
    largest = max(float(g.abs().max()) for g in gradients.values())
    for plan in PLANS if family == "gpt2" else ("cp2 sp2", "dp2 tp2"):
        found, more = run(family, plan)
        assert abs(float(found - loss)) < 1e-10 * abs(float(loss)), plan
        for name, gradient in more.items():
            scale = max(float(gradients[name].abs().max()), 1e-3 * largest)
            assert float((gradient - gradients[name]).abs().max()) < 1e-10 * scale, (plan, name)


def test_emitted_programs_say_how_their_tensors_are_cut() -> None:
    plan = Plan(Strategy.parse("cp2 tp2"))
    source = emit(distribute(traced("gpt2")[0], plan, default_pipeline().append(OneDeviceDropout())), plan)
    assert 'where=(("cp", 1, 1, True), ("tp", 1, 1, False))' in source
    assert 'where=(("cp", 2, 1, True), ("tp", 1, 1, False))' in source.split("ops.attention(")[1].split("#")[0]
    assert "F.dropout" not in source


def test_masks_differ_without_it() -> None:
    """Else the test above would show nothing."""
    assert abs(float(run("gpt2", "sp2", keyed=False)[0] - run("gpt2", "dp1", keyed=False)[0])) > 1e-4
    assert abs(float(run("gpt2", "dp1")[0] - run("gpt2", "dp1", keyed=False)[0])) > 1e-5


def test_verification_switches_it_off() -> None:
    with without_dropout():
        assert float(run("gpt2", "cp2")[0]) == pytest.approx(float(run("gpt2", "dp1", keyed=False)[0]), rel=1e-12)

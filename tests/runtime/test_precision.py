"""Dtypes of a training step: what they mean, which plans agree on them, and how near to full precision they come."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from hgc.errors import PlanError
from hgc.plan import Precision
from hgc.runtime.precision import Dtypes, read_precision
from tests.runtime.programs import Model, batch, plan, reference, whole_state

PLAIN = Precision(parameters="bfloat16")
AUTOCAST = Precision(compute="bfloat16", parameters="float32")
MASTER = Precision(compute="bfloat16", parameters="bfloat16", master="float32", gradients="float32")
STATE = whole_state(reference(torch.float32))
STEPS = 5
ROWS = 24


def train(
    precision: Precision, dp: int = 1, zero: int = 0, micro_batches: int = 1
) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first step's gradients and the last weights, of rank 0."""

    def rank_main(rank: int) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
        chosen = plan(dp, 1, zero)
        trainer = rt.Trainer(Model, chosen, state=STATE, device="cpu", precision=precision, micro_batches=micro_batches)
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.01, momentum=0.9)
        losses, first = [], {}
        for step in range(STEPS):
            losses.append(trainer.step(batch(step, ROWS)).item())
            first = first or {name: g.clone() for name, g in trainer.full_gradients().items() if g is not None}
            trainer.clip_grad_norm(5.0)
            optimizer.step()
            optimizer.zero_grad()
            assert trainer.loss(batch(step, ROWS)) != losses[-1]  # the model computes with what the optimizer has made
        return losses, first, trainer.full_state_dict()

    return run_ranks(dp, rank_main)[0]


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    """Mean relative distance of tensors."""
    own = [name for name, t in truth.items() if t.is_floating_point() and t.norm() > 0]
    return sum(float((found[name].double() - truth[name]).norm() / truth[name].norm()) for name in own) / len(own)


@pytest.mark.parametrize("precision", [PLAIN, AUTOCAST, MASTER], ids=["plain", "autocast", "master"])
def test_every_zero_stage_gives_the_same_numbers(precision: Precision) -> None:
    losses, gradients, weights = train(precision, dp=2)
    for zero in (1, 2, 3):
        found_losses, found_gradients, found_weights = train(precision, dp=2, zero=zero)
        # the two uses of a tied table add up in the gradient's dtype without ZeRO, in that of the parameters with it
        assert found_losses == pytest.approx(losses, rel=2e-3)
        assert found_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            limit = 0.01 if name == "embed.weight" else 0.0
            torch.testing.assert_close(found_gradients[name], gradient, rtol=limit, atol=limit * float(gradient.abs().max()), msg=name)
        assert error(found_weights, weights) < 1e-3


def test_mixed_precision_is_nearer_to_full_precision_than_plain_bfloat16() -> None:
    losses, gradients, weights = train(Precision(parameters="float64"), dp=2)
    plain = train(PLAIN, dp=2)
    for precision in (AUTOCAST, MASTER):
        found = train(precision, dp=2)
        assert found[0] == pytest.approx(losses, rel=0.02)
        assert error(found[1], gradients) < 0.02
        assert error(found[2], weights) < 0.5 * error(plain[2], weights)
    assert error(plain[2], weights) < 0.02


def test_gradients_of_micro_batches_add_up_in_the_dtype_that_is_asked_for() -> None:
    _, truth, _ = train(Precision(parameters="float64"), micro_batches=24)
    narrow, wide = (train(replace(MASTER, gradients=g), micro_batches=24)[1] for g in ("bfloat16", "float32"))
    assert error(wide, truth) < 0.95 * error(narrow, truth)
    sent_wide, sent_narrow = (train(Precision(gradients=g), dp=2)[1] for g in ("", "bfloat16"))
    assert 1e-4 < error(sent_narrow, {n: t.double() for n, t in sent_wide.items()}) < 1e-2


def test_what_is_kept_and_what_is_updated() -> None:
    def dtypes(precision: Precision, zero: int) -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype]]:
        def rank_main(rank: int) -> tuple[set[torch.dtype], set[torch.dtype], set[torch.dtype]]:
            trainer = rt.Trainer(Model, plan(2, 1, zero), state=STATE, device="cpu", precision=precision)
            trainer.step(batch(0, ROWS))
            kept = {tensor.dtype for tensor in trainer.model.parameters() if tensor.dim() > 1}
            parameters = [p for p in trainer.parameters() if p.grad is not None and p.dim() > 1]
            return kept, {p.dtype for p in parameters}, {p.grad.dtype for p in parameters if p.grad is not None}

        return run_ranks(2, rank_main)[0]

    full, half = {torch.float32}, {torch.bfloat16}
    assert dtypes(AUTOCAST, 0) == (full, full, full)
    assert dtypes(PLAIN, 0) == (half, half, half)
    assert dtypes(MASTER, 0) == (half, full, full)
    assert dtypes(MASTER, 2)[1:] == (full, full)
    assert dtypes(Precision(parameters="bfloat16", gradients="float32"), 0) == (half, half, half)


def test_words_become_dtypes() -> None:
    assert read_precision(Precision()) == Dtypes()
    double = Dtypes(parameters=torch.float64, others=torch.float64)
    assert read_precision(Precision(parameters="float64")) == read_precision(Precision(compute="float64")) == double
    half = Dtypes(parameters=torch.bfloat16, others=torch.float32, autocast=torch.bfloat16)
    assert read_precision(PLAIN) == half
    assert read_precision(Precision(compute="bfloat16")) == Dtypes(autocast=torch.bfloat16)


@pytest.mark.parametrize(
    ("precision", "sentence"),
    [
        (Precision(products="float8"), "products in float8 are known to costs only"),
        (Precision(compute="float16"), "compute float16 needs its loss scaled"),
        (Precision(compute="float32", parameters="bfloat16"), "would convert every parameter"),
        (Precision(parameters="float32", master="bfloat16"), "narrower than parameters float32"),
    ],
)
def test_what_cannot_run_is_refused(precision: Precision, sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence):
        read_precision(precision)


def test_two_answers_are_refused() -> None:
    with pytest.raises(PlanError, match="give one of them"):
        rt.Trainer(Model, plan(), dtype=torch.float64, precision=PLAIN)

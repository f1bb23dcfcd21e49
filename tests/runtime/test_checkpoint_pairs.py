"""Every plan continues what every other plan has saved: parameters, optimizer state and the curve of losses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from hgc.plan import Precision
from tests.runtime import programs
from tests.runtime.programs import batch, plan, reference, whole_state

FULL = Precision(parameters="float64")
MIXED = Precision(parameters="float32", master="float64", gradients="float64")
STATE = whole_state(reference())
SAVED, CONTINUED = 2, 2


class Recomputing(programs.Model):
    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = rt.recompute(layer, x)
        return self.head(x, labels)


@dataclass(frozen=True)
class Kept:
    """What tells plans apart here; the name is that of the checkpoint too."""

    dp: int = 1
    tp: int = 1
    zero: int = 0
    recompute: bool = False
    precision: Precision = FULL
    micro_batches: int = 1

    def __str__(self) -> str:
        extras = ["recompute"] * self.recompute + ["mixed"] * (self.precision == MIXED) + [f"micro{self.micro_batches}"]
        return "-".join([f"dp{self.dp}-tp{self.tp}-zero{self.zero}", *extras])

    def start(self) -> tuple[rt.Trainer, torch.optim.Optimizer]:
        model, info = Recomputing if self.recompute else programs.Model, plan(self.dp, self.tp, self.zero)
        trainer = rt.Trainer(model, info, state=STATE, device="cpu", precision=self.precision, micro_batches=self.micro_batches)
        return trainer, torch.optim.AdamW(trainer.parameters(), lr=0.05)


PLANS = (
    Kept(),
    Kept(dp=2),
    Kept(tp=2, recompute=True),
    Kept(dp=2, tp=2, micro_batches=2),
    Kept(dp=2, zero=1),
    Kept(dp=2, tp=2, zero=2, recompute=True),
    Kept(dp=3, zero=3),
    Kept(dp=2, zero=3, micro_batches=3),
    Kept(precision=MIXED),
    Kept(dp=2, zero=2, precision=MIXED),
)


def train(trainer: rt.Trainer, optimizer: torch.optim.Optimizer, first: int, steps: int) -> list[float]:
    losses = []
    for step in range(first, first + steps):
        losses.append(trainer.step(batch(step, 12)).item())
        trainer.clip_grad_norm(2.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of every plan, after two steps."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for kept in PLANS:

        def rank_main(rank: int, kept: Kept = kept) -> None:
            trainer, optimizer = kept.start()
            train(trainer, optimizer, 0, SAVED)
            trainer.save(folder / str(kept), optimizer, SAVED)

        run_ranks(kept.dp * kept.tp, rank_main)
    return folder


def continued(after: Kept, saved: Path) -> dict[Kept, list[float]]:
    """The losses of ``after`` behind the checkpoint of each plan."""

    def rank_main(rank: int) -> dict[Kept, list[float]]:
        trainer, optimizer = after.start()
        return {before: train(trainer, optimizer, trainer.load(saved / str(before), optimizer), CONTINUED) for before in PLANS}

    return run_ranks(after.dp * after.tp, rank_main)[0]


def uninterrupted(precision: Precision) -> list[float]:
    (losses,) = run_ranks(1, lambda rank: train(*Kept(precision=precision).start(), 0, SAVED + CONTINUED))
    return losses[SAVED:]


@pytest.mark.parametrize("after", PLANS, ids=str)
def test_losses_continue_as_if_nothing_had_happened(after: Kept, saved: Path) -> None:
    """Ten times ten ordered pairs; what was or is computed in float32 agrees as far as float32 goes."""
    expected = uninterrupted(after.precision)
    for before, losses in continued(after, saved).items():
        exact = before.precision == after.precision == FULL
        assert losses == pytest.approx(expected, rel=1e-10 if exact else 1e-5), str(before)


def test_another_curve_would_be_noticed(saved: Path) -> None:
    """Without the optimizer's state the losses are others by far more than the limits above."""

    def rank_main(rank: int) -> list[float]:
        trainer, optimizer = Kept().start()
        return train(trainer, optimizer, trainer.load(saved / str(PLANS[1])), CONTINUED)

    (losses,) = run_ranks(1, rank_main)
    assert losses[0] == pytest.approx(uninterrupted(FULL)[0], rel=1e-10)
    assert losses[1] != pytest.approx(uninterrupted(FULL)[1], rel=1e-3)

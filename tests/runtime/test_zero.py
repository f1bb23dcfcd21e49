"""What each ZeRO stage sends and keeps, counted."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from tests.runtime.programs import LAYERS, Model, batch, plan, reference, whole_state

STATE = whole_state(reference())
UNITS = LAYERS + 1
MICRO_BATCHES = 3


def sent(zero: int, micro_batches: int) -> tuple[int, int]:
    """Gathers and scatters of one step of each of two ranks."""

    calls: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return original(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    def rank_main(rank: int) -> None:
        options: dict[str, Any] = {"state": STATE, "device": "cpu", "dtype": torch.float64, "micro_batches": micro_batches}
        rt.Trainer(Model, plan(2, 1, zero), **options).step(batch(0, 12))

    with counted("all_gather_single"), counted("reduce_scatter_single"):  # what FSDP2 calls
        run_ranks(2, rank_main)
    return calls["all_gather_single"] // 2, calls["reduce_scatter_single"] // 2


@pytest.mark.parametrize(
    ("zero", "gathers", "scatters"),
    [(0, 0, 0), (1, UNITS, UNITS), (2, UNITS, MICRO_BATCHES * UNITS), (3, MICRO_BATCHES * (UNITS + LAYERS), MICRO_BATCHES * UNITS)],
)
def test_collectives_of_a_step(zero: int, gathers: int, scatters: int) -> None:
    """Stages 1 and 2 gather each unit once a step; 3 gathers blocks in every forward and backward, and the root unit once for both."""
    assert sent(zero, MICRO_BATCHES) == (gathers, scatters)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_the_optimizer_keeps_a_share(zero: int) -> None:
    def rank_main(rank: int) -> tuple[int, int]:
        trainer = rt.Trainer(Model, plan(4, 1, zero), state=STATE, device="cpu", dtype=torch.float64)
        optimizer = torch.optim.AdamW(trainer.parameters())
        trainer.step(batch(0, 8))
        optimizer.step()
        layers = [p for name, p in trainer.named_parameters() if name.startswith("layers.")]
        moments = [t for p in layers for t in optimizer.state[p].values() if t.dim()]
        return sum(t.numel() for t in moments), sum(p.grad.numel() for p in layers if p.grad is not None)

    whole = sum(p.numel() for name, p in reference().named_parameters() if name.startswith("layers."))
    for moments, gradients in run_ranks(4, rank_main):
        assert moments == 2 * whole // 4
        assert gradients == whole // 4


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_nothing_is_stale_after_an_optimizer_step(zero: int) -> None:
    """Evaluate, train, evaluate: each forward sees the weights that the optimizer has left, gathered or not."""

    def losses(zero: int, dp: int) -> list[float]:
        def rank_main(rank: int) -> list[float]:
            trainer = rt.Trainer(Model, plan(dp, 1, zero), state=STATE, device="cpu", dtype=torch.float64)
            optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
            found = [trainer.loss(batch(0)).item()]
            for step in range(2):
                trainer.step(batch(step))
                optimizer.step()
                found += [trainer.loss(batch(0)).item(), float(trainer.state_dict()["embed.weight"].sum())]
                optimizer.step()  # the same gradients again, behind an evaluation
                optimizer.zero_grad()
            state: dict[str, Tensor] = trainer.full_state_dict()
            trainer.load_state_dict({name: 0.5 * t if t.is_floating_point() else t for name, t in state.items()})
            return [*found, trainer.loss(batch(0)).item()]

        return run_ranks(dp, rank_main)[0]

    assert losses(zero, 2) == pytest.approx(losses(0, 1), rel=1e-10)

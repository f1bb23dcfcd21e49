"""The trainer against the model on one device, over several steps, with ranks as threads."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hgc import runtime as rt
from tests.distributed.threads import run_ranks
from tests.runtime.programs import Model, batch, plan, reference, whole_state

PLANS = [(1, 1, 0), (2, 1, 0), (1, 2, 0), (2, 2, 0), (4, 1, 0), (2, 1, 3), (2, 2, 3), (3, 1, 3)]
ROWS = 12


def train_reference(steps: int, clip: float) -> list[tuple[Tensor, dict[str, Tensor | None], Tensor]]:
    model = reference()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    history = []
    for step in range(steps):
        loss = model(**batch(step, ROWS))
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.detach(), gradients, norm))
    return history


@pytest.mark.parametrize(("dp", "tp", "zero"), PLANS)
def test_steps_equal_one_device(dp: int, tp: int, zero: int) -> None:
    state = whole_state(reference())

    def rank_main(rank: int) -> list[tuple[Tensor, dict[str, Tensor | None], Tensor]]:
        trainer = rt.Trainer(Model, plan(dp, tp, zero), state=state, device="cpu", dtype=torch.float64)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
        history = []
        for step in range(4):
            loss = trainer.step(batch(step, ROWS))
            gradients = trainer.full_gradients()
            norm = trainer.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
            history.append((loss, gradients, norm))
        return history

    expected = train_reference(4, 0.5)
    for history in run_ranks(dp * tp, rank_main):
        for (loss, gradients, norm), (want_loss, want_gradients, want_norm) in zip(history, expected, strict=True):
            torch.testing.assert_close((loss, norm), (want_loss, want_norm), rtol=1e-10, atol=1e-12)
            assert gradients.keys() == want_gradients.keys()
            for name, want in want_gradients.items():
                if want is None:
                    assert gradients[name] is None, name
                else:
                    torch.testing.assert_close(gradients[name], want, rtol=1e-9, atol=1e-12, msg=name)

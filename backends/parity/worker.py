"""One rank of a parity check. ``torchrun --nproc-per-node N -m hgc.backends.parity.worker FOLDER EXECUTABLE``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hgc import runtime
from hgc.backends import torchrun
from hgc.backends.parity.case import Case, Outcome, make_optimizer, precision, without_dropout
from hgc.runtime.mesh import leave

CASE, OUTCOME = "case.pt", "outcome.pt"


def run_rank(model: Any, plan: Any, case: Case) -> Outcome:
    """Train the emitted model on this rank; the outcome is whole and the same on every rank. The caller switches dropout off."""
    numbers: dict[str, Any] = {"dtype": case.dtype} if case.precision is None else {"precision": case.precision}
    trainer = runtime.make_trainer(model, plan, state=case.state, device="cpu", **numbers)
    optimizer = make_optimizer(case, list(trainer.parameters()))
    losses: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    with precision(case.dtype):
        for step, batch in enumerate(case.batches):
            optimizer.zero_grad()
            losses.append(float(trainer.step(batch)))
            if step == 0:
                gradients = {n: g.clone() for n, g in trainer.full_gradients().items() if g is not None}
            optimizer.step()
    return Outcome(losses, gradients, {n: t.clone() for n, t in trainer.full_state_dict().items()})


def main(folder: str, executable: str) -> None:
    torch.set_num_threads(1)
    case = torch.load(Path(folder) / CASE, weights_only=False)
    model, plan = torchrun.load_model(Path(executable))
    with without_dropout():
        outcome = run_rank(model, plan, case)
    if dist.get_rank() == 0:
        torch.save(outcome, Path(folder) / OUTCOME)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(*sys.argv[1:])

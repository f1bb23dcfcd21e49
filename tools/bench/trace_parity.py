"""Does a program compute what its model computes: loss and every gradient, from the same weights and random numbers."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgc.ir.program import Program
from hgc.tools.bench.zoo import Loss

_FLOOR = 1e-3  # of the model's largest gradient: below it, gradients that are zero in theory are noise


@dataclass(frozen=True)
class Difference:
    """Relative differences, of the loss and of the worst gradient, and the parameter it belongs to."""

    loss: float
    gradient: float
    parameter: str

    @property
    def worst(self) -> float:
        return max(self.loss, self.gradient)


def compare(model: nn.Module, program: Program, batch: Mapping[str, Any], loss: Loss | None = None, seed: int = 0) -> Difference:
    """Run model and program on ``batch`` under one seed; the model's buffers are left as they were."""
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    wanted = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    torch.manual_seed(seed)
    expected = eager_loss(model, batch, loss)
    expected_grads = torch.autograd.grad(expected, [p for _, p in wanted], allow_unused=True)
    _restore(model, kept)
    torch.manual_seed(seed)
    found = program.run({name: x for name, x in batch.items() if isinstance(x, Tensor)}, state)
    found_grads = torch.autograd.grad(found, [p for _, p in wanted], allow_unused=True)
    _restore(model, kept)
    largest = max((float(g.abs().max()) for g in expected_grads if g is not None), default=0.0)
    worst, name = 0.0, ""
    for (parameter, p), a, b in zip(wanted, expected_grads, found_grads, strict=True):
        error = _relative(_or_zero(a, p), _or_zero(b, p), _FLOOR * largest)
        if error > worst:
            worst, name = error, parameter
    return Difference(_relative(expected, found, 1e-12), worst, name)


def eager_loss(model: nn.Module, batch: Mapping[str, Any], loss: Loss | None = None) -> Tensor:
    """The loss of the unmodified model; with ``loss``, the model gets the inputs that its forward names."""
    if loss is None:
        output = model(**batch)
        found = output if isinstance(output, Tensor) else output.loss
    else:
        names = inspect.signature(model.forward).parameters
        found = loss(model(**{name: x for name, x in batch.items() if name in names}), dict(batch))
    assert isinstance(found, Tensor)
    return found


def _or_zero(grad: Tensor | None, parameter: Tensor) -> Tensor:
    return torch.zeros_like(parameter) if grad is None else grad


def _relative(a: Tensor, b: Tensor, floor: float) -> float:
    difference = float((a.detach() - b.detach()).abs().max())
    return difference / max(float(a.detach().abs().max()), floor, 1e-30) if difference else 0.0


def _restore(model: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])

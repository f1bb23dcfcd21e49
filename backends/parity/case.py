"""What both sides of a parity check receive, and what they return."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hgc.ir.ops import keyed
from hgc.plan import Precision

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}


@dataclass(frozen=True)
class Case:
    """Weights (original names, whole tensors), the global batches of each step, and the optimizer.

    ``dtype``: of everything, unless there is a ``precision``.
    """

    state: dict[str, Tensor]
    batches: list[dict[str, Tensor]]
    dtype: torch.dtype = torch.float32
    optimizer: str = "sgd"
    learning_rate: float = 0.05
    precision: Precision | None = None


@dataclass(frozen=True)
class Outcome:
    """What training gave: losses of all steps, the first step's gradients, the last step's state; original names, whole tensors."""

    losses: list[float]
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Reference:
    """The single-device model as stored beside an executable: structure without weights, loss, constants and an example batch."""

    model: nn.Module
    loss: Callable[..., Tensor] | None
    inputs: dict[str, Tensor]
    constants: dict[str, Any] = field(default_factory=dict)


def make_optimizer(case: Case, parameters: Any) -> torch.optim.Optimizer:
    options: dict[str, Any] = {"momentum": 0.9} if case.optimizer == "sgd" else {}
    return OPTIMIZERS[case.optimizer](parameters, lr=case.learning_rate, **options)


@contextmanager
def without_dropout() -> Iterator[None]:
    """Dropout, in modules, functions and attention, becomes the identity: the two sides would draw different masks."""
    functional = torch.nn.functional
    attend = functional.scaled_dot_product_attention

    def keep(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return x

    def attend_all(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, *a: Any, **k2: Any) -> Tensor:
        return attend(q, k, v, attn_mask, 0.0, *a, **k2)

    with (
        mock.patch.object(functional, "dropout", keep),
        mock.patch.object(functional, "dropout1d", keep),
        mock.patch.object(functional, "dropout2d", keep),
        mock.patch.object(torch, "dropout", keep),
        mock.patch.object(functional, "scaled_dot_product_attention", attend_all),
        mock.patch.object(keyed, "factors", lambda seed, places, p, dtype: torch.ones((), dtype=dtype, device=places[0][0].device)),
    ):
        yield


class _Widened(TorchFunctionMode):
    """Every mention of float32 reads float64, so that models that compute norms or losses in float32 are compared in full precision."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def widen(item: Any) -> Any:
            return torch.float64 if item is torch.float32 else item

        if func is Tensor.float:
            func = Tensor.double
        return func(*map(widen, args), **{name: widen(value) for name, value in (kwargs or {}).items()})


@contextmanager
def precision(dtype: torch.dtype) -> Iterator[None]:
    """The context both sides compute in: for float64, casts to float32 inside the model become casts to float64."""
    if dtype != torch.float64:
        yield
        return
    with _Widened(), mock.patch.object(torch.nn.functional, "grouped_mm", _grouped_mm):
        yield


def _grouped_mm(rows: Tensor, weight: Tensor, *, offs: Tensor) -> Tensor:
    """``F.grouped_mm`` of rows [R, I] and matrices [E, I, O], which torch has for 32 bits and fewer only."""
    ends = offs.tolist()
    groups = torch.split(rows, [end - start for start, end in zip([0, *ends], ends, strict=False)])
    return torch.cat([group @ matrix for group, matrix in zip(groups, weight, strict=True)])


def to_dtype(tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Floating tensors in ``dtype``, others as they are."""
    return {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}

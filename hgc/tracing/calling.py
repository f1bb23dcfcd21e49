"""How the user's model is called, and where its loss comes from."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hgc.errors import TraceError

Loss = Callable[[Any, dict[str, Any]], Tensor]


@dataclass(frozen=True)
class Caller:
    """Calls the model with tensors and constants by name and returns the scalar loss."""

    constants: dict[str, Any]
    loss: Loss | None
    accepted: frozenset[str]

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Raises ``TraceError`` if neither the model nor ``loss`` gives a scalar."""
        everything = {**batch, **self.constants}
        output = model(**{name: x for name, x in everything.items() if name in self.accepted})
        return _scalar(self.loss(output, everything) if self.loss is not None else _own_loss(output))


def make_caller(model: nn.Module, inputs: Mapping[str, Any], loss: Loss | None) -> tuple[Caller, dict[str, Tensor]]:
    """Split the example inputs into tensors and constants, and decide which of them the model takes.

    All of them, unless ``loss`` is given and the model's ``forward`` does not name them: those are for ``loss`` only.
    """
    tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
    constants = {name: x for name, x in inputs.items() if not isinstance(x, Tensor)}
    for name, x in inputs.items():
        if not name.isidentifier():
            raise TraceError(f"The input name {name!r} is not a Python identifier; rename it.")
        if name in constants and _holds_tensor(x):
            raise TraceError(f"The input {name!r} is a {type(x).__name__} that holds tensors; give each tensor a name of its own.")
    return Caller(constants, loss, _accepted(model, inputs, loss is not None)), tensors


def _accepted(model: nn.Module, inputs: Mapping[str, Any], separate_loss: bool) -> frozenset[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    named = {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    known = frozenset(inputs) & named
    if not separate_loss:
        unknown = sorted(set(inputs) - named)
        if unknown and not takes_any:
            raise TraceError(
                f"{type(model).__name__}.forward takes no argument {unknown[0]!r} (it takes {', '.join(sorted(named)) or 'none'}); "
                "rename the input, or pass loss= if only the loss needs it."
            )
        return frozenset(inputs)
    return known if known or not takes_any else frozenset(inputs)


def _holds_tensor(x: Any) -> bool:
    if isinstance(x, dict):
        return any(map(_holds_tensor, x.values()))
    if isinstance(x, list | tuple):
        return any(map(_holds_tensor, x))
    return isinstance(x, Tensor)


def _own_loss(output: Any) -> Any:
    if isinstance(output, Tensor):
        return output
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    return getattr(output, "loss", output)


def _scalar(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor):
        raise TraceError(
            f"The model returned {_describe(loss)} and no loss; include the labels in example_inputs, "
            "or pass loss=lambda output, batch: ..."
        )
    if loss.dim() != 0 or not loss.is_floating_point():
        raise TraceError(
            f"The loss is {_describe(loss)}, expected one floating-point number; pass loss=lambda output, batch: ... that reduces it."
        )
    return loss


def _describe(x: Any) -> str:
    if isinstance(x, Tensor):
        return f"a {str(x.dtype).removeprefix('torch.')} tensor with {x.dim()} dims"
    return "None" if x is None else f"a {type(x).__name__}"

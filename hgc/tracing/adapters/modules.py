"""Adapters for single module classes whose ``forward`` export cannot follow: a replacement that computes the same."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Adapter = Callable[[nn.Module], None]

_ADAPTERS: dict[str, Adapter] = {}


def adapter(class_name: str) -> Callable[[Adapter], Adapter]:
    """Register a function that changes a module of the named class, on the copy that is traced, before export.

    >>> @adapter("MyExperts")
    ... def _(module):
    ...     module.forward = functools.partial(traceable_forward, module)
    """

    def register(function: Adapter) -> Adapter:
        _ADAPTERS[class_name] = function
        return function

    return register


def adapt_modules(model: nn.Module) -> None:
    """Apply every adapter that fits, whatever library the class comes from."""
    for module in model.modules():
        found = _ADAPTERS.get(type(module).__name__)
        if found is not None:
            found(module)


def replace_forward(module: nn.Module, forward: Callable[..., Tensor]) -> None:
    """Make ``forward(module, ...)`` the module's forward."""
    vars(module)["forward"] = types.MethodType(forward, module)


@adapter("SwitchTransformersTop1Router")
def _switch_router(module: nn.Module) -> None:
    """The router casts its classifier at each call; cast the weights that are used instead."""
    classifier = module.classifier
    assert isinstance(classifier, nn.Linear)

    def cast_and_multiply(linear: nn.Linear, x: Tensor) -> Tensor:
        bias = None if linear.bias is None else linear.bias.to(x.dtype)
        return F.linear(x, linear.weight.to(x.dtype), bias)

    replace_forward(classifier, cast_and_multiply)
    vars(classifier)["to"] = lambda *args, **kwargs: classifier


@adapter("SwitchTransformersExperts")
def _switch_experts(module: nn.Module) -> None:
    """A loop over the experts that were chosen, with shapes that depend on the choice: dispatch, multiply by group, combine."""
    replace_forward(module, switch_experts_forward)


def switch_experts_forward(module: nn.Module, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """``hidden_states`` [T, H], one-hot ``selected_experts`` [T, 1, E] (all zero for a token over capacity), ``routing_weights`` [T, 1]."""
    experts: list[Any] = [expert for _, expert in sorted(module.named_children(), key=lambda item: int(item[0].rpartition("_")[2]))]
    chosen = selected_experts.argmax(-1)
    kept = selected_experts.sum(-1).to(routing_weights.dtype)
    rows, offsets, order = torch.ops.hgc.moe_dispatch(hidden_states, chosen, len(experts))
    first = experts[0]
    inner = torch.ops.hgc.grouped_linear(rows, torch.stack([e.wi.weight for e in experts]), offsets, False)
    inner = first.dropout(first.act(inner))
    outer = torch.ops.hgc.grouped_linear(inner, torch.stack([e.wo.weight for e in experts]), offsets, False)
    result: Tensor = torch.ops.hgc.moe_combine(outer, order, routing_weights * kept)
    return result

"""Tracing leaves the user's model, and everything around it, as it was."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hgc import trace
from hgc.tools.bench import zoo


def _snapshot(model: nn.Module) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for path, module in model.named_modules():
        found[f"{path} class"] = type(module)
        for name, attribute in vars(module).items():
            found[f"{path}.{name}"] = dict(attribute) if isinstance(attribute, dict) else attribute
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        found[f"{name} data"] = (tensor.data_ptr(), tensor._version, tensor.grad, tensor.requires_grad)
    return found


@pytest.mark.parametrize(("name", "mode"), [("Mixtral", False), ("Residual CNN", True), ("Switch", True)])
def test_model_is_left_as_it_was(name: str, mode: bool) -> None:
    entry = zoo.find(name)
    model = entry.build("small").train(mode)
    model.register_forward_hook(lambda module, args, output: None)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    config = copy.deepcopy(model.config.to_dict()) if hasattr(model, "config") else None
    spaces = {type(m).__module__ for m in model.modules()}
    values = [p.detach().clone() for p in model.parameters()]
    before = _snapshot(model)
    trace(model, entry.batch(2, 9), loss=entry.loss)
    after = _snapshot(model)
    assert before.keys() == after.keys()
    assert [key for key in before if not _same(before[key], after[key])] == []
    assert all(torch.equal(a, b) for a, b in zip(values, model.parameters(), strict=True))
    assert config is None or model.config.to_dict() == config
    assert not any("len" in vars(sys.modules[space]) for space in spaces)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and len(a) == 4:
        return a[0] == b[0] and a[1] == b[1] and a[2] is b[2] and a[3] == b[3]
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(a[key] is b[key] for key in a)
    return a is b or (not isinstance(a, Tensor) and bool(a == b))


def test_random_numbers_and_modes_are_left_as_they_were() -> None:
    entry = zoo.find("GPT-2")
    model = entry.build("small")
    batch = entry.batch(2, 9)
    state = torch.random.get_rng_state()
    trace(model, batch)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert model.training
    expected = model(**batch).loss
    assert torch.isfinite(expected)
    assert model.config._attn_implementation == "sdpa"

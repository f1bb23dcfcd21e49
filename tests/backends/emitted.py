"""Run emitted source in this process: import it, give it state, compare it with the Program it came from."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hgc.backends.torchrun import emit
from hgc.backends.torchrun.header import constants_of
from hgc.ir.program import Program
from hgc.plan import Plan

_numbers = itertools.count()


def load_source(source: str) -> ModuleType:
    """The source as a module of its own."""
    module = ModuleType(f"emitted_{next(_numbers)}")
    sys.modules[module.__name__] = module
    exec(compile(source, f"{module.__name__}.py", "exec"), module.__dict__)
    return module


def fill(model: Any, state: Mapping[str, Tensor]) -> None:
    """Give a model on the meta device copies of whole tensors by the user's names."""
    for name, (declared, places) in model.declarations().items():
        for holder, leaf in places:
            value = state[name].detach().clone()
            if declared.kind == "parameter":
                holder._parameters[leaf] = nn.Parameter(value, requires_grad=declared.requires_grad)
            else:
                holder._buffers[leaf] = value


def state_of(model: nn.Module, program: Program) -> dict[str, Tensor]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {**{name: tensor.detach() for name, tensor in named}, **constants_of(program)}


def run_both(program: Program, state: Mapping[str, Tensor], inputs: Mapping[str, Any], source: str | None = None) -> tuple[Tensor, Tensor]:
    """Loss of the Program and of its emitted source, with the same random numbers."""
    module = load_source(source if source is not None else emit(program, Plan()))
    model = module.Model()
    model.tie(module.PLAN.tied)
    fill(model, state)
    torch.manual_seed(1)
    expected = program.run({name: inputs[name] for name in module.PLAN.inputs}, {k: v.clone() for k, v in state.items()})
    torch.manual_seed(1)
    return expected, model(**{name: inputs[name] for name in module.PLAN.inputs})


def without_alignment(source: str) -> str:
    """Trailing comments two spaces behind the code, as formatters have them."""
    return re.sub(r"(?m)(\S) {2,}# ", r"\1  # ", source)

"""The single-device side: the unmodified module, and how it is stored beside an executable."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hgc.backends.parity.case import Case, Outcome, Reference, make_optimizer, precision, to_dtype, without_dropout
from hgc.errors import ArtifactError
from hgc.plan import Precision
from hgc.runtime.precision import read_precision
from hgc.tracing.calling import make_caller

FILE = "reference.pt"


def pack(model: nn.Module, example_inputs: Mapping[str, Any], loss: Any = None) -> bytes | None:
    """The reference as bytes, or None if the module or its loss cannot be pickled (a lambda, a class of ``__main__``)."""
    if any(module.__class__.__module__ == "__main__" for module in model.modules()):
        return None
    try:
        return pickle_of(make(model, example_inputs, loss))
    except (pickle.PicklingError, AttributeError, TypeError):
        return None


def pickle_of(reference: Reference) -> bytes:
    buffer = io.BytesIO()
    torch.save(reference, buffer)
    return buffer.getvalue()


def load(directory: Path) -> Reference:
    """Raises :class:`~hgc.errors.ArtifactError` if the folder holds no reference."""
    path = directory / FILE
    if not path.exists():
        raise ArtifactError(
            f"{directory} holds no {FILE}, because the model could not be stored; pass it: hgc.verify({str(directory)!r}, model=...)"
        )
    try:
        found = torch.load(path, weights_only=False, map_location="cpu")
    except (pickle.UnpicklingError, AttributeError, ImportError, EOFError, RuntimeError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); compile the model again") from None
    if not isinstance(found, Reference):
        raise ArtifactError(f"{path} is no reference of hgc but a {type(found).__name__}; compile the model again")
    return found


def make(model: nn.Module, example_inputs: Mapping[str, Any], loss: Any = None) -> Reference:
    inputs = {name: v for name, v in example_inputs.items() if isinstance(v, Tensor)}
    constants = {name: v for name, v in example_inputs.items() if not isinstance(v, Tensor)}
    return Reference(without_weights(model), loss, inputs, constants)


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the module tree with its parameters on the meta device; buffers keep their values, ties stay ties."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def materialise(model: nn.Module, seed: int) -> dict[str, Tensor]:
    """The model's own state, meta tensors replaced by numbers drawn from the seed: normal with 0.02, ones for vectors named weight."""
    generator = torch.Generator().manual_seed(seed)
    state: dict[str, Tensor] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        if not tensor.is_meta:
            state[name] = tensor.detach().cpu().clone()
        elif not tensor.is_floating_point():
            state[name] = torch.zeros(tensor.shape, dtype=tensor.dtype)
        elif tensor.dim() < 2 and name.endswith("weight"):
            state[name] = torch.ones(tensor.shape, dtype=tensor.dtype)
        else:
            state[name] = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).mul_(0.02).to(tensor.dtype)
    return _share(model, state)


def _share(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Names of one tensor get one value."""
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        state[name] = state[first.setdefault(id(parameter), name)]
    return state


def run(reference: Reference, case: Case) -> Outcome:
    """Train the unmodified module in this process; of a precision it takes what forward computes in."""
    model = build(reference.model, case)
    optimizer = make_optimizer(case, [p for p in model.parameters() if p.requires_grad])
    dtypes = read_precision(case.precision or Precision())
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    with without_dropout(), precision(case.dtype):
        for step, batch in enumerate(case.batches):
            optimizer.zero_grad(set_to_none=False)  # who gets no gradient in this step (an expert without tokens) keeps its momentum
            with dtypes.computing(torch.device("cpu")):
                loss = loss_of(model, reference, to_dtype(batch, case.dtype))
            loss.backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach().item())
            if step == 0:
                gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
            optimizer.step()
    return Outcome(losses, gradients, {n: t.detach().clone() for n, t in model.state_dict().items()})


def build(structure: nn.Module, case: Case) -> nn.Module:
    """A real module of the structure with the case's weights."""
    model = copy.deepcopy(structure)
    with torch.no_grad():
        model = _fill(model, case.state)
    return model.to(case.dtype)


def _fill(model: nn.Module, state: Mapping[str, Tensor]) -> nn.Module:
    """Replace every tensor in place of the module tree, keeping ties."""
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                full = f"{path}.{name}" if path else name
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(state[full].clone(), requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = state[f"{path}.{name}" if path else name].clone()
    return model


def loss_of(model: nn.Module, reference: Reference, batch: Mapping[str, Tensor]) -> Tensor:
    """The model's loss, called as tracing calls it."""
    caller, tensors = make_caller(model, {**batch, **reference.constants}, reference.loss)
    return caller(model, tensors)

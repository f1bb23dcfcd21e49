"""A structural copy of the user's model: same modules, same ties, no data. Tracing changes the copy only."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from hgc._torch_compat import fake_tensor_mode, non_persistent_buffers
from hgc.errors import TraceError
from hgc.ir.program import State
from hgc.ir.value import Value


@dataclass(frozen=True)
class ModelCopy:
    """The copy, the mode that its fake tensors live in, and the state of the original under its original names."""

    model: nn.Module
    fake_mode: Any
    state: dict[str, State]


def copy_structure(model: nn.Module) -> ModelCopy:
    """Copy ``model`` with fake CPU tensors in place of its parameters and buffers.

    Raises ``TraceError`` if a non-persistent buffer has no values (it is on the meta device), or if some attribute cannot be copied.
    """
    state = collect_state(model)
    fake_mode = fake_tensor_mode()
    memo: dict[int, Any] = {}
    for _, tensor in _named_state(model):
        if id(tensor) not in memo:
            memo[id(tensor)] = _fake(tensor, fake_mode)
    for path, module in model.named_modules():
        memo.update(_plain_tensors(path, module))
    try:
        duplicate = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:
        raise TraceError(f"The model cannot be copied for tracing ({error}); keep such objects out of the modules' attributes.") from error
    return ModelCopy(duplicate, fake_mode, state)


def collect_state(model: nn.Module) -> dict[str, State]:
    """Parameters and buffers by original name; tied ones once, under the first name, with the others as aliases."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in _named_state(model):
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    transient = _non_persistent(model)
    state = {}
    for key, (name, *aliases) in names.items():
        tensor = tensors[key]
        parameter = isinstance(tensor, nn.Parameter)
        persistent = parameter or not transient.issuperset((name, *aliases))
        if not persistent and tensor.is_meta:
            raise TraceError(
                f"Buffer {name!r} is on the meta device and in no state dict, so its values are unknown; "
                "build the model inside hgc.tracing.empty_weights() instead of torch.device('meta')."
            )
        value = Value(tuple(sympy.Integer(size) for size in tensor.shape), tensor.dtype, tensor.requires_grad)
        data = None if persistent else tensor.detach().clone()
        state[name] = State(name, value, "parameter" if parameter else "buffer", tuple(aliases), persistent, data)
    return state


def _named_state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _non_persistent(model: nn.Module) -> set[str]:
    return {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in non_persistent_buffers(module)
    }


def _fake(tensor: Tensor, fake_mode: Any) -> Tensor:
    with fake_mode:
        fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
        return nn.Parameter(fake, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else fake


def _plain_tensors(path: str, module: nn.Module) -> dict[int, Tensor]:
    """Tensors kept as ordinary attributes become constants of the program; the copy reads them from the CPU."""
    found = {}
    for name, value in vars(module).items():
        if isinstance(value, Tensor):
            if value.is_meta:
                raise TraceError(
                    f"Tensor attribute {name!r} of module {path or 'the model'!r} is on the meta device and has no values; "
                    "make it a buffer, or build the model inside hgc.tracing.empty_weights()."
                )
            found[id(value)] = value.detach().cpu()
    return found


@contextmanager
def empty_weights() -> Iterator[None]:
    """Build a model of any size without its memory: parameters land on the meta device, buffers keep their values.

    >>> with empty_weights():
    ...     model = LlamaForCausalLM(config)
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        with _UninitialisedOnMeta():
            yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _UninitialisedOnMeta(TorchFunctionMode):
    """Weights are made by ``torch.empty`` or at random, values that matter are not: send only the former to the meta device."""

    _UNINITIALISED = frozenset({torch.empty, torch.rand, torch.randn})

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._UNINITIALISED and kwargs.get("device") is None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)

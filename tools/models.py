"""From a name on the command line to a model and its example inputs."""

from __future__ import annotations

import importlib
import inspect
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hgc import records
from hgc.errors import HgcError
from hgc.tools import hugging_face


def load(name: str, batch_size: int, sequence_length: int) -> tuple[nn.Module, dict[str, Any]]:
    """The model that ``hf:PATH`` or ``module:function`` names, and its example inputs.

    hf: models have no weights (they live on meta) and inputs of the sizes given; a function decides for itself.
    Raises :class:`HgcError` if the name is neither, or if what it names cannot be loaded.
    """
    kind, _, target = name.partition(":")
    if not target or not kind:
        raise HgcError(f"{name!r} names no model; write hf:path/to/config.json or module:function")
    if kind == "hf":
        return hugging_face.build(target, batch_size, sequence_length)
    return _from_python(name)


def _from_python(target: str) -> tuple[nn.Module, dict[str, Any]]:
    module_name, _, function_name = target.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is None or not module_name.startswith(missing.name):
            raise HgcError(f"{target!r}: module {module_name!r} imports {missing.name!r}, which is not installed") from None
        raise HgcError(f"{target!r}: there is no module {module_name!r}, neither here nor installed; check the spelling") from None
    except SyntaxError as wrong:
        raise HgcError(f"{target!r}: {wrong.filename} line {wrong.lineno} is not Python ({wrong.msg}); mend it") from None
    functions = [name for name, value in vars(module).items() if inspect.isfunction(value) and not name.startswith("_")]
    function = getattr(module, function_name, None)
    if not callable(function):
        hint = records.suggestion(function_name, functions) if functions else "it has none"
        raise HgcError(f"{target!r}: module {module_name!r} has no function {function_name!r}; {hint}")
    try:
        made = function()
    except HgcError:
        raise
    except Exception as failed:
        place = traceback.extract_tb(failed.__traceback__)[-1]
        raise HgcError(f"{target!r} failed at {place.filename}:{place.lineno}: {type(failed).__name__}: {failed}") from None
    return _checked(target, made)


def _checked(target: str, made: Any) -> tuple[nn.Module, dict[str, Any]]:
    wanted = "expected (model, example_inputs), a torch.nn.Module and a dict from input name to tensor"
    if not isinstance(made, tuple) or len(made) != 2:
        raise HgcError(f"{target!r} returned {type(made).__name__}; {wanted}")
    model, inputs = made
    if not isinstance(model, nn.Module):
        raise HgcError(f"{target!r} returned {type(model).__name__} as the model; {wanted}")
    if not isinstance(inputs, Mapping) or not all(isinstance(name, str) for name in inputs):
        raise HgcError(f"{target!r} returned {type(inputs).__name__} as the example inputs; {wanted}")
    if not any(isinstance(value, torch.Tensor) for value in inputs.values()):
        raise HgcError(f"{target!r} returned example inputs without a tensor; {wanted}")
    return model, dict(inputs)

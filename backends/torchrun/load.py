"""Import a saved program as a module."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

from hgc.backends.torchrun.folder import PROGRAM, notes
from hgc.errors import ArtifactError
from hgc.runtime import Model, PipelineInfo, PlanInfo
from hgc.runtime.pipeline import Stages


def load_model(directory: Path) -> tuple[type[Model] | Stages, PlanInfo]:
    """The ``Model`` class (of a pipeline: ``STAGES``) and ``PLAN`` of a saved program, imported under a module name of its own.

    Importing runs the file. A program that was edited is used as it is, with a warning (on rank 0). Raises
    :class:`~hgc.errors.ArtifactError` if the folder is no executable, is damaged, or its program does not import.
    """
    for note in notes(directory):
        if os.environ.get("RANK", "0") == "0":
            warnings.warn(note, stacklevel=2)
    path = (directory / PROGRAM).resolve()
    module = _import(path)
    model, plan = getattr(module, "Model", None), getattr(module, "PLAN", None)
    stages = getattr(module, "STAGES", None)
    if isinstance(plan, PipelineInfo) and isinstance(stages, tuple) and all(map(callable, stages)):
        return stages, plan
    if not (isinstance(model, type) and issubclass(model, Model)) or not isinstance(plan, PlanInfo):
        raise ArtifactError(
            f"{str(path)!r} defines no class Model and no PLAN of hgc.runtime, nor a pipeline's STAGES; mend it, or compile the model again"
        )
    return model, plan


def _import(path: Path) -> ModuleType:
    name = f"hgc_program_{hashlib.sha256(str(path).encode()).hexdigest()[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # whatever an edited program raises is the user's to see, in one sentence
        del sys.modules[name]
        raise ArtifactError(f"{str(path)!r} does not import ({_shown(error)}); mend it, or compile the model again") from error
    finally:
        sys.dont_write_bytecode = before
    return module


def _shown(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())

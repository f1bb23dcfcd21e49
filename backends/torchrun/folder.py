"""The folder of an executable: written whole or not at all, and read back with a check of what it is."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hgc import records
from hgc.backends.torchrun.emit import emit
from hgc.backends.torchrun.header import CONSTANTS, constants_of
from hgc.backends.torchrun.launch import launch_script
from hgc.errors import ArtifactError
from hgc.ir.program import Program
from hgc.plan import Plan

PROGRAM, PLAN, MANIFEST, LAUNCH = "program.py", "plan.json", "manifest.json", "launch.sh"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What wrote the folder, and the hash of the program as it was written."""

    program_sha256: str
    program_hash: str
    torch: str
    model: str
    version: int = VERSION


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes ``directory`` if the block ends well and leaves no trace if it does not.

    An executable that was there is replaced. Raises :class:`~hgc.errors.ArtifactError` if something else is there.
    """
    check_target(directory)
    directory.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{directory.name}-", dir=directory.parent))
    try:
        yield staging
        staging.chmod(0o755)
        if directory.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{directory.name}-old-", dir=directory.parent))
            os.replace(directory, old / directory.name)
            os.replace(staging, directory)
            shutil.rmtree(old)
        else:
            os.replace(staging, directory)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_target(directory: Path) -> None:
    """Raise if ``directory`` is there and is neither empty nor an executable of hgc."""
    if directory.exists() and not directory.is_dir():
        raise ArtifactError(f"{directory} is a file; give a folder to write the executable to")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise ArtifactError(f"{directory} holds files that hgc did not write; give a new folder, or empty this one")


def write(staging: Path, program: Program, plan: Plan) -> None:
    """Source, plan, constants, launch script and manifest."""
    source = emit(program, plan)
    (staging / PROGRAM).write_text(source)
    plan.save(staging / PLAN)
    constants = constants_of(program)
    if constants:
        torch.save(constants, staging / CONSTANTS)
    (staging / LAUNCH).write_text(launch_script(plan))
    (staging / LAUNCH).chmod(0o755)
    manifest = Manifest(_sha256(source), plan.program_hash, torch.__version__, program.name)
    records.write_text(staging / MANIFEST, records.to_text(records.encode(manifest)), "manifest", ArtifactError)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def read_manifest(directory: Path) -> Manifest:
    """Raises :class:`~hgc.errors.ArtifactError` if the folder is no executable, or of another version."""
    if not directory.is_dir():
        raise ArtifactError(f"{str(directory)!r} is no folder; give the folder that hgc compile wrote")
    for name in (MANIFEST, PROGRAM, PLAN):
        if not (directory / name).is_file():
            raise ArtifactError(f"{str(directory)!r} is no executable of hgc: it has no {name}; give the folder that hgc compile wrote")
    text = records.read_text(directory / MANIFEST, "manifest", ArtifactError)
    content = records.parse_json(text, f"{directory / MANIFEST}", ArtifactError)
    if not isinstance(content, dict) or content.get("version") != VERSION:
        raise ArtifactError(f"{directory / MANIFEST} is of another version of hgc; compile the model again")
    return records.decode(Manifest, content, str(directory / MANIFEST), ArtifactError)


def is_edited(directory: Path) -> bool:
    """Was ``program.py`` changed after hgc wrote it? That is allowed."""
    return _sha256((directory / PROGRAM).read_text()) != read_manifest(directory).program_sha256


def load_model(directory: Path) -> tuple[type[Any], Any]:
    """The ``Model`` class and ``PLAN`` of a saved program, imported under a name of its own.

    Raises :class:`~hgc.errors.ArtifactError` if the folder is no executable, is damaged, or its program does not import.
    """
    read_manifest(directory)
    Plan.load(directory / PLAN)
    path = (directory / PROGRAM).resolve()
    name = f"hgc_program_{_sha256(str(path))[:16]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"{path} cannot be imported; compile the model again")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
        return module.Model, module.PLAN
    except Exception as error:  # whatever an edited program raises is the user's to see, in one sentence
        del sys.modules[name]
        raise ArtifactError(f"{path} does not import ({type(error).__name__}: {error}); mend it, or compile the model again") from error

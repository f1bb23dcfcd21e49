"""The folder of an executable: written whole or not at all, and read back with a check of what it is."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hgc import records
from hgc.backends.torchrun.emit import emit
from hgc.backends.torchrun.header import CONSTANTS, constants_of
from hgc.backends.torchrun.launch import launch_script
from hgc.backends.torchrun.stages import emit_stages
from hgc.errors import ArtifactError, PlanError
from hgc.ir.program import Program
from hgc.plan import Plan
from hgc.schedule import Schedule

PROGRAM, PLAN, MANIFEST, LAUNCH, CLUSTER = "program.py", "plan.json", "manifest.json", "launch.sh", "cluster.json"
VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """What wrote the folder: hash of the source as it was written, hash of the traced program, torch's version, all files by name."""

    program_sha256: str
    program_hash: str
    torch: str
    model: str
    files: tuple[str, ...] = ()
    version: int = VERSION


@dataclass(frozen=True)
class Pipeline:
    """The lowered stages of a program, and the order in which they work."""

    stages: tuple[Program, ...]
    schedule: Schedule


@contextmanager
def staged(directory: Path) -> Iterator[Path]:
    """A new folder to write into, which becomes ``directory`` if the block ends well and leaves no trace if it does not.

    An executable that was there is replaced; what others put into its folder (checkpoints) stays, and a program that was edited is kept as
    ``program.edited.py``. Raises :class:`~hgc.errors.ArtifactError` if something else is there, or if the folder cannot be written.
    """
    check_target(directory)
    target = Path(os.path.realpath(directory))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as failed:
        raise ArtifactError(f"{str(directory)!r} cannot be written: {failed.strerror}; give another folder") from None
    try:
        yield staging
        _list_files(staging)
        staging.chmod(0o755)
        _move_into_place(staging, target)
    except OSError as failed:
        raise ArtifactError(f"{str(directory)!r} cannot be written: {failed.strerror or failed}; nothing was changed there") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_target(directory: Path) -> None:
    """Raise if ``directory`` is there and is neither empty nor an executable of hgc."""
    if directory.exists() and not directory.is_dir():
        raise ArtifactError(f"{str(directory)!r} is a file; give a folder to write the executable to")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / MANIFEST).exists():
        raise ArtifactError(f"{str(directory)!r} holds files that hgc did not write; give a new folder, or empty this one")


def _list_files(staging: Path) -> None:
    """Note in the manifest which files are hgc's, so that the next save knows them from the user's."""
    if (staging / MANIFEST).exists():
        names = tuple(sorted(path.name for path in staging.iterdir()))
        _save_manifest(staging, replace(read_manifest(staging), files=names))


def _move_into_place(staging: Path, target: Path) -> None:
    if not target.exists():
        os.replace(staging, target)
        return
    kept = _not_ours(target)
    old = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent)) / target.name
    os.replace(target, old)
    try:
        os.replace(staging, target)
    except OSError:
        os.replace(old, target)
        raise
    for name, new_name in kept.items():
        os.replace(old / name, _free(target / new_name))
    shutil.rmtree(old.parent)


def _not_ours(directory: Path) -> dict[str, str]:
    """Entries that hgc did not write, or that were edited since, and the names under which they are kept."""
    names = {path.name for path in directory.iterdir()} - {"__pycache__"}
    try:
        ours = {MANIFEST, *read_manifest(directory).files}
        edited = is_edited(directory)
    except ArtifactError:  # damaged: nothing in it is known to be replaceable
        ours, edited = {MANIFEST}, True
    kept = {name: name for name in sorted(names - ours)}
    return kept | {PROGRAM: "program.edited.py"} if edited and PROGRAM in names else kept


def _free(path: Path) -> Path:
    """The path itself, or with a number if it is taken."""
    candidate, count = path, 2
    while candidate.exists():
        candidate, count = path.with_name(f"{path.stem}-{count}{path.suffix}"), count + 1
    return candidate


def write(staging: Path, program: Program, plan: Plan, pipeline: Pipeline | None = None) -> None:
    """Source, plan, constants, launch script and manifest; of a pipeline with what its stages are instead of the whole ``program``."""
    source = emit_stages(pipeline.stages, plan, pipeline.schedule) if pipeline else emit(program, plan)
    (staging / PROGRAM).write_text(source, encoding="utf-8")
    plan.save(staging / PLAN)
    constants = {name: data for stage in (pipeline.stages if pipeline else (program,)) for name, data in constants_of(stage).items()}
    if constants:
        torch.save(constants, staging / CONSTANTS)
    (staging / LAUNCH).write_text(launch_script(plan), encoding="utf-8")
    (staging / LAUNCH).chmod(0o755)
    _save_manifest(staging, Manifest(_sha256(source.encode()), plan.program_hash, torch.__version__, program.name))


def _save_manifest(folder: Path, manifest: Manifest) -> None:
    records.write_text(folder / MANIFEST, records.to_text(records.encode(manifest)), "manifest", ArtifactError)


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    return _sha256((directory / PROGRAM).read_bytes()) != read_manifest(directory).program_sha256


def _plan(directory: Path) -> Plan:
    try:
        return Plan.load(directory / PLAN)
    except PlanError as error:
        raise ArtifactError(str(error)) from None


def notes(directory: Path) -> tuple[str, ...]:
    """What a person should know before running the folder: sentences about an edited program and a plan of another program."""
    manifest, plan = read_manifest(directory), _plan(directory)
    found = [f"{directory / PROGRAM} was edited after hgc wrote it; the edited program is used"] if is_edited(directory) else []
    if plan.program_hash != manifest.program_hash:
        found.append(f"{directory / PLAN} is the plan of another program than {PROGRAM}; what runs is {PROGRAM}")
    return tuple(found)

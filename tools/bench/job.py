"""A benchmark's ranks: cases go to a worker module through a folder, and its results come back."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from hgc import records
from hgc.backends import torchrun
from hgc.backends.parity.verify import last_error
from hgc.errors import ArtifactError

CASES, RESULTS = "cases.json", "results.json"
T = TypeVar("T")


def run_cases(
    folder: Path, worker: str, cases: Sequence[Any], result: type[T], ranks: int, timeout_s: float, launcher: Sequence[str] = ()
) -> list[T]:
    """Results of ``cases``, in order, from ``python -m worker FOLDER`` on every rank.

    ``launcher``: a command that runs what follows it on every rank; default: torchrun on this machine. Raises ``ArtifactError`` if a
    rank fails, or if it takes longer than ``timeout_s``.
    """
    (folder / CASES).write_text(records.to_text(records.encode(cases)), encoding="utf-8")
    (folder / RESULTS).unlink(missing_ok=True)
    program = ["-m", worker, str(folder)]
    command = [*launcher, sys.executable, *program] if launcher else torchrun.local_command(ranks, program)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    what = f"{len(cases)} case{'s' * (len(cases) > 1)} on {ranks} process{'es' * (ranks > 1)}"
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ArtifactError(f"{what} took more than {timeout_s:.0f} s; give timeout_s=...") from None
    except FileNotFoundError:
        raise ArtifactError(f"there is no command {command[0]!r} to start the ranks with; give another --launch") from None
    if done.returncode != 0 or not (folder / RESULTS).exists():
        raise ArtifactError(f"{what} failed: {last_error(done.stderr + done.stdout)}")
    return [records.decode(result, entry, RESULTS, ArtifactError) for entry in _read(folder / RESULTS)]


def read_cases(folder: Path, case: type[T]) -> Iterator[T]:
    """On a rank: the cases of its folder."""
    return (records.decode(case, entry, CASES, ArtifactError) for entry in _read(folder / CASES))


def write_results(folder: Path, results: Sequence[Any]) -> None:
    """On the rank that speaks for all."""
    (folder / RESULTS).write_text(records.to_text(records.encode(results)), encoding="utf-8")


def _read(path: Path) -> Any:
    return records.parse_json(records.read_text(path, path.name, ArtifactError), path.name, ArtifactError)

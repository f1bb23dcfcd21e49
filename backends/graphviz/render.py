"""From DOT to a file: an image if the ``dot`` binary is there, else the DOT source and one line that says how to get the image."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import graphviz

from hgc.errors import ArtifactError

FORMATS = ("svg", "png", "pdf")
SOURCES = ("dot", "gv")
TIME_LIMIT_S = 60.0


class Drawing(graphviz.Source):  # type: ignore[misc]
    """A picture: shows itself in a notebook, and ``source`` is its DOT text."""

    def save_as(self, path: str | Path) -> Written:
        """Write the picture; the ending of ``path`` chooses the format. Raises :class:`ArtifactError` for an unknown ending or folder."""
        target = Path(path)
        ending = target.suffix.lstrip(".").lower()
        if ending not in (*FORMATS, *SOURCES):
            known = ", ".join(f".{known}" for known in (*FORMATS, *SOURCES))
            raise ArtifactError(f"picture {str(path)!r} ends in {target.suffix!r}; expected one of {known}")
        if not target.parent.is_dir():
            raise ArtifactError(f"picture {str(path)!r} cannot be written: there is no folder {str(target.parent)!r}; create it first")
        if ending in SOURCES:
            return Written(_replace(target, self.source.encode()))
        image, why = _run_dot(self.source, ending)
        if image is not None:
            return Written(_replace(target, image))
        source = _replace(target.with_suffix(".dot"), self.source.encode())
        command = f"dot -T{ending} {source.name} -o {target.name}"
        return Written(source, f"{why}: wrote {source.name} instead of {target.name}; for the picture run, beside it: {command}")


@dataclass(frozen=True)
class Written:
    """The file that was written; ``note`` is one line if it is not the one asked for."""

    path: Path
    note: str = ""


def _run_dot(source: str, ending: str) -> tuple[bytes | None, str]:
    if shutil.which("dot") is None:
        return None, "the Graphviz program 'dot' is not installed"
    try:
        done = subprocess.run(["dot", f"-T{ending}"], input=source.encode(), capture_output=True, timeout=TIME_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return None, f"'dot' did not finish in {TIME_LIMIT_S:.0f} s"
    if done.returncode != 0:
        return None, f"'dot' failed ({done.stderr.decode(errors='replace').strip().splitlines()[-1:]})"
    return done.stdout, ""


def _replace(target: Path, content: bytes) -> Path:
    part = target.with_name(f".{target.name}.part")
    try:
        part.write_bytes(content)
        part.replace(target)
    except OSError as failed:
        part.unlink(missing_ok=True)
        raise ArtifactError(f"picture {str(target)!r} cannot be written: {failed.strerror}") from None
    return target

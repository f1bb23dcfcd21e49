"""What pictures in SVG have in common: their file, their first lines, their text."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from hgc import records
from hgc.errors import ArtifactError


def write(path: str | Path, picture: str) -> None:
    """Whole or not at all. Raises :class:`~hgc.errors.ArtifactError` for another format than SVG."""
    if Path(path).suffix != ".svg":
        raise ArtifactError(f"the picture {str(path)!r} would not be SVG; give a name that ends with .svg")
    records.write_text(path, picture, "picture", ArtifactError)


def head(width: float, height: float) -> Iterator[str]:
    font = 'font-family="Helvetica, Arial, sans-serif" font-size="11"'
    yield f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" {font}>'
    yield f'<rect width="{width}" height="{height}" fill="white"/>'


def text(x: float, y: float, words: str, anchor: str = "start", colour: str = "#333") -> str:
    return f'<text x="{x:.1f}" y="{y:g}" text-anchor="{anchor}" fill="{colour}">{escape(words)}</text>'

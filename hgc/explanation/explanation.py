"""Findings as words, as a table and as a picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hgc.explanation import picture, words
from hgc.explanation.result import Findings


@dataclass(frozen=True)
class Explanation(Findings):
    """Why a plan: prints as sentences and one table."""

    def draw(self, path: str | Path) -> None:
        """Write throughput over memory of all plans that were seen (``.svg``)."""
        picture.save(self, path)

    def __str__(self) -> str:
        return words.text(self)

"""Comments that divide a ``forward`` by the modules of the user's model."""

from __future__ import annotations

from collections.abc import Sequence

FEWEST = 8
"""Statements from which on a body is divided."""


class Sections:
    """A heading where the module changes. ``paths`` are the module paths of the statements in order, ``""`` for none of its own.

    Blocks that have a place in the model are divided by their direct children, glue by the first parts in which its paths differ.
    """

    def __init__(self, has_path: bool, paths: Sequence[str]) -> None:
        self._has_path, self._paths = has_path, [path.strip(".") for path in paths]
        own = [path.split(".") for path in self._paths if path]
        self._depth = 1 if has_path else _common(own) + 1
        self._headings = [self._heading(path) for path in self._paths]
        while self._depth > 1 and sum(self._changes(i) for i in range(len(paths))) * 2 > len(paths):
            self._depth -= 1
            self._headings = [self._heading(path) for path in self._paths]

    def _heading(self, path: str) -> str:
        """The path cut at the dividing depth, extended while everything below it is in one module."""
        if not path:
            return ""
        parts = path.split(".")
        cut = parts[: self._depth + 1] if parts[self._depth : self._depth + 1] and parts[self._depth].isdigit() else parts[: self._depth]
        below = [p.split(".") for p in self._paths if p.split(".")[: len(cut)] == cut]
        return ".".join(below[0][: max(len(cut), _common(below))])

    def heading(self, position: int) -> str | None:
        """The heading in front of a statement if it starts a section, ``""`` for one without a name."""
        if len(self._headings) < FEWEST or len(set(self._headings)) < 2:
            return None
        return self._headings[position] if self._changes(position) else None

    def _changes(self, position: int) -> bool:
        found = self._headings[position]
        if not found and self._has_path:
            return False  # sums along the residual stream
        return found != next((h for h in reversed(self._headings[:position]) if h or not self._has_path), "")


def _common(paths: Sequence[Sequence[str]]) -> int:
    """Number of leading parts that all paths share."""
    count = 0
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        count += 1
    return count

"""What boxes say and how they look. Every text passes :func:`text`, so no name can break or inject into a label."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import graphviz
import sympy

from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard
from hgc.ir.value import Value

FONT = "Helvetica"
INK = "#1f2328"
FAINT = "#6b7280"
END = "#dde3ea"
MODULE = {"style": "rounded,filled", "fillcolor": "#f6f8fa", "color": "#d0d7de"}
COLLECTIVE = "#5b21b6"

PLACEMENT_COLOURS: dict[type[Placement], str] = {Shard: "#a8d1f5", Partial: "#f9b9a0", Replicated: "#fbe08d", Invariant: "#cfe8c6"}
PLACEMENT_WORDS: dict[type[Placement], str] = {
    Shard: "S(d): split along dim d",
    Partial: "P: ranks hold summands",
    Replicated: "R: same on all ranks, gradient is summed",
    Invariant: "I: same on all ranks, gradient too",
}


def text(value: object) -> str:
    """Escaped for a Graphviz HTML label; control characters are dropped, for they are not XML."""
    return html.escape("".join(c for c in str(value) if c.isprintable()), quote=True)


def shape(sizes: Iterable[sympy.Expr]) -> str:
    """``[B, T, 256]``, or ``scalar``."""
    listed = ", ".join(str(size) for size in sizes)
    return f"[{listed}]" if listed else "scalar"


def dtype(value: Value) -> str:
    return str(value.dtype).removeprefix("torch.")


def plain(value: object) -> str:
    """Escaped for a quoted Graphviz attribute; line ends stay."""
    return str(graphviz.escape("".join(c for c in str(value) if c.isprintable() or c == "\n")))


def tooltip(value: Value, mesh: Mapping[str, int]) -> str:
    """Everything about a value that the box leaves out."""
    placed = "".join(f"\n{axis}: {placement}" for axis, placement in value.placements)
    local = f"\non one rank {shape(value.local_shape(dict(mesh)))}" if value.placements else ""
    return f"{shape(value.shape)} {dtype(value)}{local}{placed}"


@dataclass(frozen=True)
class Row:
    """One line of a box."""

    content: str
    bold: bool = False
    faint: bool = False
    colour: str = ""
    fill: str = ""

    def __str__(self) -> str:
        inner = f"<B>{text(self.content)}</B>" if self.bold else text(self.content)
        colour = self.colour or (FAINT if self.faint else INK)
        size = 12 if self.bold else 10
        return f'<FONT COLOR="{colour}" POINT-SIZE="{size}">{inner}</FONT>'


@dataclass(frozen=True)
class Box:
    """A label: rows of text, then a row of placement chips."""

    rows: tuple[Row, ...]
    chips: tuple[tuple[str, Placement], ...] = ()
    marks: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f'<TR><TD ALIGN="CENTER">{row}</TD></TR>' for row in self.rows]
        if self.chips:
            lines.append(f"<TR><TD>{chips(self.chips)}</TD></TR>")
        lines += [f'<TR><TD BGCOLOR="{COLLECTIVE}">{Row(mark, colour="white")}</TD></TR>' for mark in self.marks]
        return f'<<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="1" CELLPADDING="1">{"".join(lines)}</TABLE>>'


def chips(placements: Iterable[tuple[str, Placement]]) -> str:
    cells = "".join(
        f'<TD BGCOLOR="{PLACEMENT_COLOURS[type(placement)]}" STYLE="ROUNDED" CELLPADDING="2">{Row(f"{axis} {placement}")}</TD>'
        for axis, placement in placements
    )
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="3"><TR>{cells}</TR></TABLE>'


def legend(title: str, lines: Iterable[str], kinds: Iterable[type[Placement]], samples: Iterable[tuple[str, str, str]]) -> str:
    """The legend as a label. ``samples`` are (fill, border, meaning) of what is not a placement."""
    rows = [f'<TR><TD COLSPAN="2" ALIGN="LEFT">{Row(title, bold=True)}</TD></TR>']
    rows += [f'<TR><TD COLSPAN="2" ALIGN="LEFT">{Row(line)}</TD></TR>' for line in lines]
    swatches = [
        (PLACEMENT_COLOURS[kind], PLACEMENT_COLOURS[kind], PLACEMENT_WORDS[kind]) for kind in PLACEMENT_COLOURS if kind in set(kinds)
    ]
    for fill, border, meaning in [*swatches, *samples]:
        cell = f'<TD BGCOLOR="{fill}" COLOR="{border}" BORDER="1" WIDTH="26" HEIGHT="14" FIXEDSIZE="TRUE"></TD>'
        rows.append(f'<TR>{cell}<TD ALIGN="LEFT">{Row(meaning)}</TD></TR>')
    return f'<<TABLE BORDER="1" COLOR="#d0d7de" CELLBORDER="0" CELLSPACING="3" CELLPADDING="2">{"".join(rows)}</TABLE>>'

"""The timeline as an SVG: for each group of ranks its actions, and a thin row for each stream of communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hgc.backends.simulator import svg
from hgc.backends.simulator.numbers import seconds
from hgc.backends.simulator.timeline import ACTIONS, Event, Timeline
from hgc.backends.simulator.work import COMPUTE, OPTIMIZER, SEND
from hgc.schedule.actions import shown_ranks

COLOURS = {"F": "#4c78a8", "B": "#72b7b2", "I": "#72b7b2", "W": "#b8d8a8", "optimizer": "#9d755d", "compute": "#a0aec0", "send": "#e45756"}
AXIS_COLOURS = ("#f58518", "#b279a2", "#eeca3b", "#ff9da6", "#54a24b")
LABELS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights", "optimizer": "optimizer", "send": "messages"}
LEFT, WIDTH, TALL, THIN, GAP, TOP = 130, 1200, 22, 7, 8, 44
CLOSE = 0.4
"""Boxes of one colour that are nearer than this, in pixels, are drawn as one, the paler the more of it is empty."""


@dataclass(frozen=True)
class _Box:
    """``busy``: how many of its pixels are filled."""

    x: float
    end: float
    colour: str
    label: str
    busy: float


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the picture, whole or not at all. Raises :class:`~hgc.errors.ArtifactError` for another format than SVG."""
    svg.write(path, draw(timeline))


def draw(timeline: Timeline) -> str:
    """The text of the picture."""
    scale = WIDTH / timeline.step_s if timeline.step_s else 0.0
    axes = sorted({_row(event) for events in timeline.events for event in events} - {ACTIONS, COMPUTE})
    y, shapes = TOP, list[str]()
    used: dict[str, str] = {}
    for ranks, events in zip(timeline.ranks, timeline.events, strict=True):
        name = f"rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)}"
        shapes.append(svg.text(LEFT - 8, y + 15, name if len(name) < 20 else f"{name[:17]}...", "end"))
        for row in [ACTIONS, *(axis for axis in axes if any(_row(event) == axis for event in events))]:
            height = TALL if row == ACTIONS else THIN
            shown = sorted((event for event in events if _row(event) == row), key=lambda event: event.begin_s)
            boxes = _joined(_box(e, scale, axes, used) for e in shown if e.end_s > e.begin_s)
            shapes.append(f'<rect x="{LEFT}" y="{y}" width="{WIDTH}" height="{height}" fill="#f4f4f5"/>')
            shapes += [_rectangle(box, y, height) for box in boxes]
            y += height + 1
        y += GAP
    return "\n".join([*_head(y + 30, timeline, used), *shapes, *_ticks(y, timeline.step_s), "</svg>", ""])


def _row(event: Event) -> str:
    """Actions and the optimizer share a row, and so do the messages to and from all other stages."""
    return ACTIONS if event.row == OPTIMIZER else event.row.split()[0] if event.row.startswith(f"{SEND} ") else event.row


def _box(event: Event, scale: float, axes: Sequence[str], used: dict[str, str]) -> _Box:
    colour, label = _look(event, axes, used)
    return _Box(event.begin_s * scale, event.end_s * scale, colour, label, (event.end_s - event.begin_s) * scale)


def _look(event: Event, axes: Sequence[str], used: dict[str, str]) -> tuple[str, str]:
    """Colour and label of an event; notes in ``used`` what the legend has to explain."""
    if event.row == ACTIONS:
        kind = event.name.strip("0123456789")
        label, key = event.name, kind
    else:
        label, key = "", "send" if _row(event) == SEND else event.row
    communicating = [axis for axis in axes if axis != SEND]
    colour = COLOURS[key] if key in COLOURS else AXIS_COLOURS[communicating.index(key) % len(AXIS_COLOURS)]
    used[LABELS.get(key, key)] = colour
    return colour, label


def _joined(boxes: Iterable[_Box]) -> Iterator[_Box]:
    last: _Box | None = None
    for box in boxes:
        if last and not (last.label and box.label) and box.colour == last.colour and box.x - last.end < CLOSE:
            last = _Box(last.x, max(last.end, box.end), last.colour, last.label or box.label, last.busy + box.busy)
            continue
        if last:
            yield last
        last = box
    if last:
        yield last


def _rectangle(box: _Box, y: float, height: float) -> str:
    width = max(box.end - box.x, 0.3)
    label = box.label.lstrip("0123456789")[1:]
    shown = label if width > 7 * len(label) + 2 and height == TALL else ""
    title = f"<title>{escape(box.label)}</title>" if box.label and width > 2 else ""
    full = min(1.0, box.busy / width)
    pale = f' opacity="{max(full, 0.2):.2f}"' if height == THIN and full < 0.95 else ""
    edge = ' stroke="white" stroke-width="0.6"' if width > 3 and height == TALL else ""
    found = f'<rect x="{LEFT + box.x:.1f}" y="{y}" width="{width:.1f}" height="{height}" fill="{box.colour}"{edge}{pale}>{title}</rect>'
    return found + (svg.text(LEFT + box.x + width / 2, y + 15, shown, "middle", "white") if shown else "")


def _head(height: float, timeline: Timeline, used: dict[str, str]) -> Iterator[str]:
    yield from svg.head(LEFT + WIDTH + 20, height)
    yield svg.text(LEFT, 14, f"one step: {seconds(timeline.step_s)}; in a box: the micro-batch")
    x = float(LEFT)
    for label, colour in used.items():
        yield f'<rect x="{x}" y="23" width="11" height="11" fill="{colour}"/>' + svg.text(x + 15, 33, label)
        x += 30 + 6.2 * len(label)


def _ticks(y: float, step_s: float) -> Iterator[str]:
    for index in range(11):
        x = LEFT + WIDTH * index / 10
        yield f'<line x1="{x}" y1="{TOP - 4}" x2="{x}" y2="{y}" stroke="#999" stroke-width="0.4" stroke-dasharray="2,4"/>'
        yield svg.text(x, y + 14, seconds(step_s * index / 10), "middle" if index < 10 else "end")

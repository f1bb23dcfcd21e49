"""Throughput over memory of the plans that an explanation has seen, as an SVG; what no other plan beats is joined by a line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hgc.backends.simulator import svg
from hgc.backends.simulator.numbers import seconds, size
from hgc.explanation.result import Findings
from hgc.passes.sharding.search.judged import Judged, in_words

LEFT, TOP, WIDTH, HEIGHT, RIGHT, BELOW = 80, 48, 640, 380, 330, 56
ON_FRONT, OTHER, THIS = "#4c78a8", "#b8bec8", "#e45756"
_LINE = 13
"""Height of a line of the legend, pixels."""
_MOST_NAMED = 24
_LONGEST_NAME = 46


@dataclass(frozen=True)
class _Scale:
    """From numbers to pixels."""

    most_bytes: float
    most_rate: float

    def x(self, memory_bytes: float) -> float:
        return LEFT + WIDTH * memory_bytes / self.most_bytes

    def y(self, rate: float) -> float:
        return TOP + HEIGHT * (1 - rate / self.most_rate)


def save(found: Findings, path: str | Path) -> None:
    """Write the picture, whole or not at all. Raises :class:`~hgc.errors.ArtifactError` for another format than SVG."""
    svg.write(path, draw(found))


def draw(found: Findings) -> str:
    """The text of the picture."""
    front = found.front()
    rates = [found.batch / each.step_s for each in found.seen]
    scale = _Scale(1.08 * max(each.memory_bytes for each in found.seen), 1.12 * max(rates))
    own = found.step_s, int(found.simulation.peak_bytes)
    shapes = [*_axes(scale), *_limit(found, scale), *_front(found, front, scale)]
    for each in found.seen:
        if each not in front:
            shapes.append(_dot(found, each, scale, OTHER, 4))
    for number, each in enumerate(front[:_MOST_NAMED], 1):
        shapes.append(_dot(found, each, scale, ON_FRONT, 5))
        shapes.append(svg.text(scale.x(each.memory_bytes) - 3, scale.y(found.batch / each.step_s) - 9, str(number), "middle", ON_FRONT))
    cross = scale.x(own[1]), scale.y(found.batch / own[0])
    shapes.append(f'<circle cx="{cross[0]:.1f}" cy="{cross[1]:.1f}" r="9" fill="none" stroke="{THIS}" stroke-width="2"/>')
    return "\n".join([*_head(found), *shapes, *_legend(found, front), "</svg>", ""])


def _head(found: Findings) -> Iterator[str]:
    yield from svg.head(LEFT + WIDTH + RIGHT, TOP + HEIGHT + BELOW)
    title = f"throughput over memory, {found.cluster.devices} devices, batch {found.batch}: {len(found.seen)} plans simulated"
    yield svg.text(LEFT, 20, title, colour="#111")


def _axes(scale: _Scale) -> Iterator[str]:
    bottom = TOP + HEIGHT
    for tick in _ticks(scale.most_rate):
        y = scale.y(tick)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{LEFT + WIDTH}" y2="{y:.1f}" stroke="#e5e7eb"/>'
        yield svg.text(LEFT - 8, y + 4, f"{tick:g}", "end")
    unit = 2.0 ** (10 * max(math.floor(math.log2(scale.most_bytes) / 10), 0))
    for tick in _ticks(scale.most_bytes / unit):
        x = scale.x(tick * unit)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#e5e7eb"/>'
        yield svg.text(x, bottom + 16, size(tick * unit) if tick else "0", "middle")
    yield f'<path d="M{LEFT} {TOP}V{bottom}H{LEFT + WIDTH}" fill="none" stroke="#666"/>'
    yield svg.text(LEFT + WIDTH / 2, bottom + 38, "memory of the fullest device", "middle")
    yield svg.text(LEFT - 8, TOP - 10, "rows/s", "end")


def _ticks(most: float) -> list[float]:
    """About six round numbers from 0."""
    rough = most / 6
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * count for count in range(int(most / step) + 1)]


def _limit(found: Findings, scale: _Scale) -> Iterator[str]:
    """The memory that a device has, if it is in the picture."""
    least = found.cluster.least_memory_bytes
    if least <= scale.most_bytes:
        x = scale.x(least)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}" stroke="{THIS}" stroke-dasharray="5,4"/>'
        yield svg.text(x - 4, TOP + 12, f"{size(least)} there are", "end", THIS)


def _front(found: Findings, front: Sequence[Judged], scale: _Scale) -> Iterator[str]:
    """Stairs: with so much memory nothing that was seen is faster."""
    points = [(scale.x(each.memory_bytes), scale.y(found.batch / each.step_s)) for each in front]
    path = f"M{points[0][0]:.1f} {points[0][1]:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in points[1:])
    yield f'<path d="{path}H{LEFT + WIDTH}" fill="none" stroke="{ON_FRONT}" stroke-width="1.5"/>'


def _dot(found: Findings, judged: Judged, scale: _Scale, colour: str, radius: int) -> str:
    rate = found.batch / judged.step_s
    title = f"{in_words(judged.plan)}: {seconds(judged.step_s)}, {size(judged.memory_bytes)}"
    fill = colour if judged.fits else "white"
    where = f'cx="{scale.x(judged.memory_bytes):.1f}" cy="{scale.y(rate):.1f}" r="{radius}"'
    return f'<circle {where} fill="{fill}" stroke="{colour}"><title>{escape(title)}</title></circle>'


def _legend(found: Findings, front: Sequence[Judged]) -> Iterator[str]:
    x, y = LEFT + WIDTH + 16, TOP + 8
    yield svg.text(x, y, f"ring: this plan, {_name(in_words(found.plan))}", colour=THIS)
    yield svg.text(x, y + _LINE, "grey: other plans; hollow: does not fit", colour="#777")
    yield svg.text(x, y + 3 * _LINE, "as fast as it gets for its memory:", colour=ON_FRONT)
    for number, each in enumerate(front[:_MOST_NAMED], 1):
        yield svg.text(x, y + (3 + number) * _LINE, f"{number}  {_name(in_words(each.plan))}")


def _name(text: str) -> str:
    return text if len(text) <= _LONGEST_NAME else f"{text[: _LONGEST_NAME - 3]}..."

"""Parameters and buffers as an emitted block declares them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hgc.backends.torchrun.expressions import sequence
from hgc.backends.torchrun.names import quote
from hgc.ir.placement import Replicated, Shard
from hgc.ir.program import State


@dataclass(frozen=True)
class Declaration:
    """One line of a block's ``__init__``: the method, the name inside the block, and everything behind the name."""

    method: str
    name: str
    rest: str

    @property
    def line(self) -> str:
        return f"self.{self.method}({quote(self.name)}, {self.rest})"


def data_axes(state: Mapping[str, State], mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Axes on which the runtime sums gradients: those where some trained parameter is R."""
    deferred = {axis for entry in state.values() if _trained(entry) for axis, p in entry.value.placements if isinstance(p, Replicated)}
    return tuple(axis for axis in mesh if axis in deferred)


def declare(name: str, entry: State, data: Sequence[str]) -> Declaration:
    """How a block declares ``entry`` under its own ``name`` for it; ``data`` are the program's data axes."""
    shape = [int(size) for size in entry.value.shape]
    stored = [entry.rows, *shape[1:]] if entry.rows is not None else shape
    given = [sequence(map(str, stored))]
    if str(entry.value.dtype) != "torch.float32":
        given.append(f"dtype={entry.value.dtype}")
    if stored != shape:
        given.append(f"pad_to={sequence(map(str, shape))}")
    if entry.kind != "parameter":
        given += [] if entry.persistent and entry.kind == "buffer" else ["persistent=False"]
        return Declaration("buffer", name, ", ".join(given + _placements(entry)))
    if not entry.value.requires_grad:
        given.append("requires_grad=False")
    elif (sync := _sync(entry)) != tuple(axis for axis in data if axis not in _sharded(entry)):
        given.append(f"sync={sequence(map(quote, sync))}")
    return Declaration("parameter", name, ", ".join(given + _placements(entry)))


def _trained(entry: State) -> bool:
    return entry.kind == "parameter" and entry.value.requires_grad


def _sync(entry: State) -> tuple[str, ...]:
    return tuple(axis for axis, placement in entry.value.placements if isinstance(placement, Replicated))


def _sharded(entry: State) -> dict[str, Shard]:
    return {axis: placement for axis, placement in entry.value.placements if isinstance(placement, Shard)}


def _placements(entry: State) -> list[str]:
    """``tp="S(0)"``; axes whose names are no plain identifiers go through a dict."""
    plain = {axis: quote(str(placement)) for axis, placement in _sharded(entry).items()}
    if all(re.fullmatch("[a-z][a-z0-9_]*", axis) for axis in plain):
        return [f"{axis}={text}" for axis, text in plain.items()]
    return [f"**{{{', '.join(f'{quote(axis)}: {text}' for axis, text in plain.items())}}}"]


def declaration_lines(declarations: Sequence[Declaration]) -> Iterator[str]:
    """Their lines; runs that differ in one number of their names only become a loop."""
    position = 0
    while position < len(declarations):
        run = _run(declarations, position)
        if run.count < 4:
            yield declarations[position].line
            position += 1
            continue
        yield f"for i in range({run.first}, {run.first + run.count}):" if run.first else f"for i in range({run.count}):"
        for template in run.templates:
            yield f"    self.{template.method}({template.name}, {template.rest})"
        position += run.count * len(run.templates)


@dataclass(frozen=True)
class _Run:
    """``count`` repetitions of ``templates`` (whose names are expressions in ``i``) for ``i`` from ``first`` on."""

    first: int
    count: int
    templates: tuple[Declaration, ...]


_NONE = _Run(0, 0, ())


def _run(declarations: Sequence[Declaration], position: int) -> _Run:
    """The longest run that starts here, over group sizes of up to 24 declarations."""
    best = _NONE
    for size in range(1, 25):
        found = _repetitions(declarations[position:], size)
        if found.count > 3 and found.count * size > best.count * len(best.templates):
            best = found
    return best


def _repetitions(declarations: Sequence[Declaration], size: int) -> _Run:
    group = declarations[:size]
    split = [re.fullmatch(r"((?:.*\.)?)(\d+)(\..*)?", d.name, re.DOTALL) for d in group]
    if len(group) < size or any(m is None for m in split):
        return _NONE
    matches = [m for m in split if m is not None]
    first = int(matches[0][2])
    if any(int(m[2]) != first or m[2] != str(first) for m in matches):
        return _NONE
    names = [(m[1], m[3] or "") for m in matches]
    count = 0
    for start in range(0, len(declarations) - size + 1, size):
        index = first + count
        expected = [Declaration(d.method, f"{before}{index}{after}", d.rest) for d, (before, after) in zip(group, names, strict=True)]
        if expected != list(declarations[start : start + size]):
            break
        count += 1
    templates = tuple(Declaration(d.method, _formatted(before, after), d.rest) for d, (before, after) in zip(group, names, strict=True))
    return _Run(first, count, templates)


def _formatted(before: str, after: str) -> str:
    """Source for the text around the number ``i``."""
    if re.fullmatch(r"[\w. -]*", before + after, re.ASCII):
        return f'f"{before}{{i}}{after}"'
    return f"{quote(before)} + str(i) + {quote(after)}"

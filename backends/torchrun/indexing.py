"""Slices, selections and advanced indexing as Python subscripts."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import torch

from hgc.backends.torchrun.expressions import Expression
from hgc.backends.torchrun.operation import Operation
from hgc.ir.value import value

aten = torch.ops.aten


def _subscript(tensor: str, rank: int, dim: int, index: str) -> Expression:
    """``tensor[:, index]`` with the index at ``dim``; an ellipsis where that is shorter."""
    dim = dim % rank
    if dim == rank - 1 and rank > 2:
        return Expression(f"{tensor}[..., {index}]")
    return Expression(f"{tensor}[{', '.join([*[':'] * dim, index])}]")


def _slice(o: Operation) -> Expression:
    start, end, step = o["start"], o["end"], o["step"]
    first = "" if start in (None, 0) else o.text("start")
    last = "" if end is None or (isinstance(end, int) and end >= sys.maxsize) else o.text("end")
    every = "" if step == 1 else f":{o.text('step')}"
    return _subscript(o.atom("self"), len(value(o["self"]).shape), o["dim"], f"{first}:{last}{every}")


def _select(o: Operation) -> Expression:
    return _subscript(o.atom("self"), len(value(o["self"]).shape), o["dim"], o.text("index"))


def _index(o: Operation) -> Expression:
    indices = list(o["indices"])
    while indices and indices[-1] is None:
        indices.pop()
    return Expression(f"{o.atom('self')}[{', '.join(':' if i is None else o.source(i).text for i in indices)}]")


def _getitem(o: Operation) -> Expression:
    source, index = o.node.args
    return Expression(f"{o.source(source).atom}[{o.source(index).text}]")


INDEXING: dict[Any, Callable[[Operation], Expression]] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.index.Tensor: _index,
    operator.getitem: _getitem,
}

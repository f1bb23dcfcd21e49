"""Views of tensors: how to take them again from changed memory, and how to write a changed view back into what it looks at."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from hgc.errors import TraceError
from hgc.ir.value import Value, info
from hgc.tracing.leaves import ENTER, EXIT
from hgc.tracing.normalise.edit import argument, aten, base, insert, sizes_of, tensor

_SAME_SHAPE = frozenset({"aten::alias", "aten::detach"})
_RESHAPES = frozenset(
    {
        "aten::view",
        "aten::reshape",
        "aten::flatten",
        "aten::unflatten",
        "aten::squeeze",
        "aten::unsqueeze",
        "aten::view_as",
        "aten::_unsafe_view",
    }
)
_PIECES = frozenset({"aten::split", "aten::chunk", "aten::split_with_sizes", "aten::unbind"})
_OTHERS = frozenset(
    {
        "aten::slice",
        "aten::select",
        "aten::narrow",
        "aten::transpose",
        "aten::t",
        "aten::permute",
        "aten::expand",
        "aten::diagonal",
        "aten::unfold",
    }
)


def looked_at(node: fx.Node) -> fx.Node | None:
    """The node whose memory this node's value is a view of; ``None`` if it has its own."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        if source.target in (ENTER, EXIT):
            return source.args[1][index]  # type: ignore[index, return-value]
        return source.args[0] if base(source) in _PIECES else None  # type: ignore[return-value]
    name = base(node)
    first: Any = node.args[0] if node.args else None
    if name in _SAME_SHAPE | _RESHAPES | _OTHERS or (_returns_itself(node, name) and isinstance(first, fx.Node)):
        return first  # type: ignore[no-any-return]
    return None


def _returns_itself(node: fx.Node, name: str) -> bool:
    """Operators that return their argument when there is nothing to do."""
    before, after = tensor(node.args[0]) if node.args else None, tensor(node)
    if before is None or after is None or before.dtype != after.dtype or before.shape != after.shape:
        return False
    if name in ("aten::to", "aten::type_as"):
        return not node.kwargs.get("copy", False)
    if name == "aten::contiguous":
        return bool(node.args[0].meta["val"].is_contiguous())  # type: ignore[union-attr]
    return name in ("aten::dropout", "aten::feature_dropout") and not (argument(node, "train") and argument(node, "p"))


def is_identity(node: fx.Node) -> bool:
    """True for a view that shows exactly what it looks at."""
    if node.target is operator.getitem:
        source = node.args[0]
        return isinstance(source, fx.Node) and source.target in (ENTER, EXIT)
    return base(node) == "aten::alias" or _returns_itself(node, base(node))


def retake(view: fx.Node, source: fx.Node, before: fx.Node) -> fx.Node:
    """The view ``view`` of the new value ``source``."""
    if is_identity(view):
        return source
    value = info(view).value
    assert value is not None
    if view.target is operator.getitem:
        pieces, index = view.args
        assert isinstance(pieces, fx.Node)
        again = insert(before, pieces.target, (source, *pieces.args[1:]), _value(pieces), pieces.kwargs)
        return insert(before, operator.getitem, (again, index), value)
    return insert(before, view.target, (source, *view.args[1:]), value, view.kwargs)


def _value(node: fx.Node) -> Value | tuple[Value, ...]:
    found = info(node).value
    assert found is not None
    return found


def write_back(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node) -> fx.Node:
    """What ``source`` becomes when its view ``view`` becomes ``new``."""
    if is_identity(view):
        return new
    whole = tensor(source)
    assert whole is not None
    name = base(view)
    if view.target is operator.getitem:
        return _write_piece(view, source, new, before, whole)
    if name in _RESHAPES:
        return insert(before, aten.reshape.default, (new, sizes_of(whole.shape)), whole)
    if name in _WRITERS:
        return _WRITERS[name](view, source, new, before, whole)
    raise TraceError(
        f"The model changes memory in place through a view made by {name.removeprefix('aten::')} ({info(view).source}), "
        "which tracing cannot follow; write that step without in-place operators."
    )


def _write_piece(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node, whole: Value) -> fx.Node:
    pieces, index = view.args
    assert isinstance(pieces, fx.Node)
    assert isinstance(index, int)
    dim = argument(pieces, "dim")
    if base(pieces) == "aten::unbind":
        return insert(before, aten.select_scatter.default, (source, new, dim, index), whole)
    values = _value(pieces)
    assert isinstance(values, tuple)
    ends = [sum((v.shape[dim] for v in values[:count]), sympy.Integer(0)) for count in (index, index + 1)]
    return insert(before, aten.slice_scatter.default, (source, new, dim, *sizes_of(tuple(ends))), whole)


def _write_transposed(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node, whole: Value) -> fx.Node:
    return insert(before, view.target, (new, *view.args[1:]), whole)


def _write_permuted(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node, whole: Value) -> fx.Node:
    dims = [dim % len(whole.shape) for dim in view.args[1]]  # type: ignore[operator, union-attr]
    return insert(before, aten.permute.default, (new, [dims.index(dim) for dim in range(len(dims))]), whole)


def _scatter(overload: Any, *names: str) -> Callable[[fx.Node, fx.Node, fx.Node, fx.Node, Value], fx.Node]:
    def write(view: fx.Node, source: fx.Node, new: fx.Node, before: fx.Node, whole: Value) -> fx.Node:
        return insert(before, overload, (source, new, *(argument(view, name) for name in names)), whole)

    return write


_WRITERS: dict[str, Callable[[fx.Node, fx.Node, fx.Node, fx.Node, Value], fx.Node]] = {
    "aten::slice": _scatter(aten.slice_scatter.default, "dim", "start", "end", "step"),
    "aten::select": _scatter(aten.select_scatter.default, "dim", "index"),
    "aten::diagonal": _scatter(aten.diagonal_scatter.default, "offset", "dim1", "dim2"),
    "aten::transpose": _write_transposed,
    "aten::t": _write_transposed,
    "aten::permute": _write_permuted,
    "aten::detach": lambda view, source, new, before, whole: insert(before, aten.detach.default, (new,), replace(whole)),
}

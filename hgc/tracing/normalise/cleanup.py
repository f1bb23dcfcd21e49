"""Drop what does not compute: assertions, casts to the same type, whole slices, copies, dead code."""

from __future__ import annotations

from typing import Any

from torch import fx

from hgc.tracing.leaves import CALL, ENTER, EXIT
from hgc.tracing.normalise.edit import argument, base, drop, tensor

_COPIES = frozenset({"aten::alias", "aten::lift_fresh_copy", "aten::clone", "aten::contiguous", "aten::detach_"})
_IF_SAME_SHAPE = frozenset(
    {"aten::slice", "aten::expand", "aten::expand_as", "aten::view", "aten::reshape", "aten::flatten", "aten::unflatten"}
    | {"aten::squeeze", "aten::broadcast_to", "aten::view_as", "aten::narrow"}
)
_CASTS = frozenset({"aten::to", "aten::_to_copy", "aten::type_as"})
_DROPOUTS = frozenset({"aten::feature_dropout", "aten::alpha_dropout", "aten::feature_alpha_dropout"})
_ASSERTIONS = ("aten::_assert", "aten::sym_constrain_range", "aten::_functional_assert")


def drop_assertions(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op == "call_function" and base(node).startswith(_ASSERTIONS):
            graph.erase_node(node)


def remove_noops(graph: fx.Graph) -> None:
    """Every node that returns one of its inputs unchanged gives way to that input. The graph must be functional."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            same = _unchanged(node)
            if same is not None:
                drop(node, same)


def _unchanged(node: fx.Node) -> fx.Node | None:
    source: Any = node.args[0] if node.args else None
    before, after = tensor(source), tensor(node)
    if before is None or after is None or before.dtype != after.dtype or before.shape != after.shape:
        return None
    name = base(node)
    same = (
        name in _COPIES
        or name in _CASTS
        or name in _IF_SAME_SHAPE
        or (name in _DROPOUTS and (argument(node, "p") == 0 or not argument(node, "train")))
        or (name == "aten::add" and node.args[1] == 0 and not isinstance(node.args[1], fx.Node))
        or (name in ("aten::mul", "aten::div") and _is_one(node.args[1]) and "rounding_mode" not in node.kwargs)
        or (name == "aten::repeat" and all(n == 1 for n in node.args[1]))  # type: ignore[union-attr]
        or (name == "aten::detach" and not before.dtype.is_floating_point)
    )
    return source if same else None


def _is_one(x: Any) -> bool:
    return isinstance(x, int | float) and x == 1


def simplify(graph: fx.Graph) -> None:
    """Remove dead code; block borders stay."""
    markers = (ENTER, EXIT, CALL)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target not in markers:
            graph.erase_node(node)

"""Small edits of a body graph that keep hgc's information right, for passes."""

from __future__ import annotations

from typing import Any

from torch import fx

from hgc.ir.value import info, set_info


def replace_call(node: fx.Node, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
    """Replace a node by another operator that computes the same tensor; what only the old node needed is erased.

    The new node takes over shape, dtype, placement and place in the model.
    """
    graph = node.graph
    with graph.inserting_before(node):
        new = graph.call_function(target, args, kwargs)
    set_info(new, info(node))
    node.replace_all_uses_with(new)
    graph.eliminate_dead_code()
    return new


def operator_of(node: Any) -> Any:
    """The operator of a call, or None for anything else; lets a matcher look at arguments without checking their kind first."""
    return node.target if isinstance(node, fx.Node) and node.op == "call_function" else None

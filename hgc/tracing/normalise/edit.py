"""Small edits of the flat graph that keep every node's ``Info``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from hgc.ir.value import Value, info, set_info

aten = torch.ops.aten


def tensor(node: Any) -> Value | None:
    """The value of a node that computes one tensor, else ``None``."""
    if not isinstance(node, fx.Node):
        return None
    found = info(node).value
    return found if isinstance(found, Value) else None


def base(node: fx.Node) -> str:
    """Operator name without overload, ``"aten::add"``; empty for anything else."""
    schema = getattr(node.target, "_schema", None)
    return schema.name if schema is not None else ""


def argument(node: fx.Node, name: str) -> Any:
    """An argument of an ATen node by name, its default if absent."""
    for position, declared in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]
        if declared.name == name:
            if position < len(node.args):
                return node.args[position]
            return node.kwargs.get(name, declared.default_value)
    raise KeyError(name)


def retarget(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None) -> None:
    """Make the node call something else that computes the same value."""
    node.target = target
    node.args = args
    node.kwargs = dict(kwargs or {})


def insert(
    before: fx.Node, target: Any, args: tuple[Any, ...], value: Value | tuple[Value, ...], kwargs: Mapping[str, Any] | None = None
) -> fx.Node:
    """A new node in front of ``before`` that belongs where ``before`` does."""
    graph = before.graph
    with graph.inserting_before(before):
        node = graph.call_function(target, args, dict(kwargs or {}))
    node.meta = dict(before.meta)
    set_info(node, replace(info(before), value=value))
    return node


def drop(node: fx.Node, instead: fx.Node) -> None:
    """Remove a node whose value ``instead`` already has."""
    node.replace_all_uses_with(instead)
    node.graph.erase_node(node)


def sizes_of(shape: tuple[sympy.Expr, ...]) -> list[int | sympy.Expr]:
    """A shape as the size argument of an operator of the flat graph."""
    return [int(size) if size.is_Integer else size for size in shape]

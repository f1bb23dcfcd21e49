"""Replace in-place operators by functional ones."""

from __future__ import annotations

from torch import fx

from hgc.errors import TraceError


def make_functional(graph: fx.Graph, holders: dict[fx.Node, str]) -> None:
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            raise TraceError(f"in-place operator {node.target}")

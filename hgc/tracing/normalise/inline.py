"""Inline the subgraphs that export makes of ``torch.no_grad`` and ``torch.autocast`` regions."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hgc._torch_compat import HigherOrderOperator
from hgc.errors import TraceError

NO_GRAD = "hgc_no_grad"


def inline_regions(module: fx.GraphModule) -> None:
    """Inline all higher-order operators whose body is a subgraph, innermost first; nodes under ``no_grad`` are marked."""
    for node in list(module.graph.nodes):
        name = getattr(node.target, "__name__", "") if node.op == "call_function" else ""
        if isinstance(node.target, HigherOrderOperator):
            _inline(module, node, name)


def _inline(module: fx.GraphModule, node: fx.Node, name: str) -> None:
    position = next((i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and a.op == "get_attr"), None)
    if position is None or name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast", "tag_activation_checkpoint"):
        raise TraceError(f"The model uses the control-flow operator {name!r}, which hgc does not distribute; write it without.")
    if name == "wrap_with_autocast":
        _refuse_autocast(node)
    getter = node.args[position]
    assert isinstance(getter, fx.Node)
    body = getattr(module, str(getter.target))
    inline_regions(body)
    inner = [n for n in body.graph.nodes if n.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(inner, node.args[position + 1 :], strict=True))
    no_grad = name == "wrap_with_set_grad_enabled" and node.args[0] is False
    with module.graph.inserting_before(node):
        for old in body.graph.nodes:
            if old.op == "output":
                _replace_results(module.graph, node, fx.map_arg(old.args[0], values.__getitem__))
            elif old.op != "placeholder":
                values[old] = new = module.graph.node_copy(old, values.__getitem__)
                new.meta = {**old.meta, NO_GRAD: True} if no_grad else dict(old.meta)
    module.graph.erase_node(node)
    if not getter.users:
        module.graph.erase_node(getter)


def _refuse_autocast(node: fx.Node) -> None:
    _, dtype, enabled, *_ = node.args
    if enabled and dtype != torch.float32:
        raise TraceError(
            f"The model enters torch.autocast({dtype}) in its forward, which tracing cannot see through; "
            "remove it and choose the precision when compiling."
        )


def _replace_results(graph: fx.Graph, node: fx.Node, results: Any) -> None:
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(results[0] if isinstance(results, list | tuple) else results)

"""Cut a list of nodes out of the flat graph as a body of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx, nn

from hgc.ir.program import State
from hgc.ir.value import Info, Value, info, set_info
from hgc.tracing.names import Namer, identifier, operator_name
from hgc.tracing.symbols import SizeBuilder


@dataclass(frozen=True)
class Cut:
    """A body, and the flat nodes that its placeholders and outputs stand for."""

    body: fx.GraphModule
    activations: tuple[fx.Node, ...]
    state: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]


def cut(
    nodes: Sequence[fx.Node],
    activations: Mapping[fx.Node, str],
    outputs: Sequence[fx.Node],
    holders: Mapping[fx.Node, str],
    states: Mapping[str, State],
    path: str,
    carriers: Mapping[fx.Node, str],
) -> Cut:
    """Build the body that computes ``outputs`` from ``activations`` (with the names wanted for them) and the state it reads.

    ``holders`` maps state placeholders to their names, ``path`` is the block's place in the model, ``carriers`` are the
    program's inputs, of which one is added to learn a size that no activation has.
    """
    inside = set(nodes)
    used = _external(nodes, inside)
    held = [node for node in used if node in holders]
    wanted = {node: activations[node] for node in activations if node in used}
    for node in _missing_carriers(nodes, list(wanted), list(carriers)):
        wanted[node] = carriers[node]
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    namer = Namer()
    for node, name in wanted.items():
        values[node] = _placeholder(graph, namer(name), replace(info(node), role="input", path="", source=""))
    for node in held:
        entry = states[holders[node]]
        relative = relative_name(entry, path)
        role = "parameter" if entry.kind == "parameter" else "buffer"
        values[node] = _placeholder(graph, namer(identifier(relative)), Info(entry.value, role=role, path=relative))
    _copy_nodes(graph, nodes, values, SizeBuilder(graph, [values[node] for node in wanted]), path)
    graph.output(tuple(values[node] for node in outputs))
    return Cut(fx.GraphModule(nn.Module(), graph, class_name="Body"), tuple(wanted), tuple(held), tuple(outputs))


def relative_name(entry: State, path: str) -> str:
    """The name of a parameter as its block knows it; the full name if it is not the block's own."""
    for name in (entry.name, *entry.aliases):
        if path and name.startswith(path + "."):
            return name.removeprefix(path + ".")
    return entry.name


def _external(nodes: Sequence[fx.Node], inside: set[fx.Node]) -> dict[fx.Node, None]:
    return {x: None for node in nodes for x in node.all_input_nodes if x not in inside}


def _copy_nodes(graph: fx.Graph, nodes: Sequence[fx.Node], values: dict[fx.Node, fx.Node], sizes: SizeBuilder, path: str) -> None:
    for node in nodes:
        args = _translate(node.args, values.__getitem__, sizes)
        kwargs = _translate(node.kwargs, values.__getitem__, sizes)
        new = graph.create_node("call_function", node.target, args, kwargs, name=operator_name(node))
        found = info(node)
        inner = found.path
        if path and (inner + ".").startswith(path + "."):
            inner = inner.removeprefix(path).removeprefix(".")
        set_info(new, replace(found, path=inner))
        values[node] = new


def _translate(argument: Any, value: Callable[[fx.Node], fx.Node], sizes: SizeBuilder) -> Any:
    if isinstance(argument, fx.Node):
        return value(argument)
    if isinstance(argument, sympy.Expr):
        return sizes(argument)
    if isinstance(argument, tuple):
        return tuple(_translate(a, value, sizes) for a in argument)
    if isinstance(argument, list):
        return [_translate(a, value, sizes) for a in argument]
    if isinstance(argument, dict):
        return {key: _translate(a, value, sizes) for key, a in argument.items()}
    if isinstance(argument, slice):
        return slice(*(_translate(a, value, sizes) for a in (argument.start, argument.stop, argument.step)))
    return argument


def _missing_carriers(nodes: Sequence[fx.Node], activations: Sequence[fx.Node], carriers: Sequence[fx.Node]) -> list[fx.Node]:
    """Program inputs to add so that every size the nodes use can be read off some input."""
    probe = SizeBuilder(fx.Graph(), activations)
    missing = {s for expr in _expressions(nodes) if not probe.can_build(expr) for s in expr.free_symbols}
    found: dict[fx.Node, None] = {}
    for symbol in sorted(missing, key=str):
        for node in (*activations, *carriers):
            value = info(node).value
            if isinstance(value, Value) and symbol in value.shape:
                if node not in activations:
                    found[node] = None
                break
    return list(found)


def _expressions(nodes: Sequence[fx.Node]) -> list[sympy.Expr]:
    found: list[sympy.Expr] = []

    def visit(argument: Any) -> None:
        if isinstance(argument, sympy.Expr):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            for a in argument:
                visit(a)
        elif isinstance(argument, dict):
            visit(list(argument.values()))

    for node in nodes:
        visit(node.args)
        visit(node.kwargs)
    return found


def _placeholder(graph: fx.Graph, name: str, found: Info) -> fx.Node:
    node = graph.placeholder(name)
    set_info(node, found)
    return node

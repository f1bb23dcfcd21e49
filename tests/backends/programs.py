"""Small programs made by hand, with any names."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx, nn

from hgc.ir.placement import Placement
from hgc.ir.program import BODIES, STATE, Program, State, SymbolInfo, new_root
from hgc.ir.value import Info, Value, set_info

aten = torch.ops.aten


@dataclass(frozen=True)
class Labels:
    """Everything that a user's model, batch or plan may name freely."""

    model: str = "Small"
    body: str = "Layer"
    places: tuple[str, ...] = ("layers.0", "layers.1")
    parameter: str = "fc.weight"
    other: str = "fc.bias"
    argument: str = "x"
    symbol: str = "b"
    meaning: str = "batch"
    axis: str = "dp"
    path: str = "fc"
    report: tuple[str, ...] = field(default=())


SIZE = sympy.Integer(4)


def make_program(labels: Labels, placed: Placement | None = None) -> Program:
    """``x = tanh(linear(x, parameter)) + other`` at each place, then the mean. ``placed``: the batch on the mesh axis ``labels.axis``."""
    batch = sympy.Symbol(labels.symbol, integer=True, positive=True)

    def value(*shape: sympy.Expr, gradient: bool = False) -> Value:
        return Value(shape, torch.float32, gradient)

    def body(name: str, states: dict[str, Value], last: bool) -> fx.GraphModule:
        graph = fx.Graph()
        x = graph.placeholder("x")
        set_info(x, Info(value(batch, SIZE), role="input"))
        held = []
        for path, found in states.items():
            held.append(graph.placeholder(f"state{len(held)}"))
            set_info(held[-1], Info(found, role="parameter", path=path))
        node = x
        if last:
            node = graph.call_function(aten.mean.default, (x,))
            set_info(node, Info(value(gradient=True), path=labels.path))
        else:
            for target, args in ((aten.linear.default, (held[0],)), (aten.tanh.default, ()), (aten.add.Tensor, (held[1],))):
                node = graph.call_function(target, (node, *args))
                set_info(node, Info(value(batch, SIZE, gradient=True), path=labels.path))
        graph.output((node,))
        return fx.GraphModule(nn.Module(), graph, class_name="Body")

    states = {labels.parameter: value(SIZE, SIZE, gradient=True), labels.other: value(SIZE, gradient=True)}
    bodies = {labels.body: body(labels.body, states, False), "Head": body("Head", {}, True)}
    root, kept = fx.Graph(), {}
    x = root.placeholder(labels.argument)
    set_info(x, Info(value(batch, SIZE), role="input"))
    for place in labels.places:
        given = []
        for relative, found in states.items():
            name = f"{place}.{relative}" if place else relative
            kept[name] = State(name, found, "parameter")
            given.append(root.get_attr(STATE + name))
            set_info(given[-1], Info(found, role="parameter", path=name))
        x = _call(root, labels.body, place, (x, *given), value(batch, SIZE, gradient=True))
    root.output(_call(root, "Head", "", (x,), value(gradient=True)))
    symbols = {batch: SymbolInfo(labels.meaning, 1, None, 6)}
    return Program(new_root(root, kept, bodies), symbols, kept, report=list(labels.report), name=labels.model)


def _call(root: fx.Graph, body: str, place: str, args: tuple[fx.Node, ...], result: Value) -> fx.Node:
    call = root.call_module(BODIES + body, args)
    set_info(call, Info((result,), path=place))
    taken = root.call_function(operator.getitem, (call, 0))
    set_info(taken, Info(result))
    return taken

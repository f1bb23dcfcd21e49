"""Which values need a gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import fx

from hgc.ir.program import BODIES, Program
from hgc.ir.value import Value, info, set_info, value
from hgc.tracing.normalise.edit import base
from hgc.tracing.normalise.inline import NO_GRAD

_STOPS = frozenset({"aten::detach", "aten::full_like", "aten::rand_like", "aten::randn_like", "aten::empty_like", "aten::bernoulli"})
_STOPS_SIGN = frozenset({"aten::sign", "aten::round", "aten::floor", "aten::ceil", "aten::trunc"})


def mark_gradients(program: Program) -> None:
    """Set ``Value.requires_grad`` everywhere. A body that is called twice needs a gradient where either call does."""
    for _ in range(1 + len(program.bodies)):  # later passes give early calls what later calls of the same body found
        for node in program.root.graph.nodes:
            if node.op == "call_module":
                _through_block(program.body(str(node.target).removeprefix(BODIES)), node)
            elif node.op == "call_function":
                source, index = node.args
                assert isinstance(source, fx.Node)
                values = info(source).value
                assert isinstance(values, tuple)
                assert isinstance(index, int)
                _mark(node, [values[index].requires_grad])


def _through_block(body: fx.GraphModule, call: fx.Node) -> None:
    for placeholder, argument in zip(_placeholders(body), call.args, strict=True):
        _mark(placeholder, [_needs(placeholder), _needs(argument)])
    for node in body.graph.nodes:
        if node.op == "call_function" and info(node).value is not None:
            stops = base(node) in _STOPS or base(node) in _STOPS_SIGN or node.meta.get(NO_GRAD, False)
            _mark(node, [] if stops else [_needs(x) for x in node.all_input_nodes])
    (output,) = (n for n in body.graph.nodes if n.op == "output")
    values = tuple(value(x) for x in output.args[0])
    set_info(call, replace(info(call), value=values))


def _placeholders(body: fx.GraphModule) -> list[fx.Node]:
    return [n for n in body.graph.nodes if n.op == "placeholder"]


def _needs(node: object) -> bool:
    if not isinstance(node, fx.Node):
        return False
    found = info(node).value
    values = found if isinstance(found, tuple) else (found,)
    return any(isinstance(v, Value) and v.requires_grad for v in values)


def _mark(node: fx.Node, sources: Iterable[bool]) -> None:
    needed = any(sources)
    found = info(node)

    def mark(old: Value) -> Value:
        return replace(old, requires_grad=needed and _differentiable(old.dtype))

    if isinstance(found.value, tuple):
        set_info(node, replace(found, value=tuple(map(mark, found.value))))
    elif found.value is not None:
        set_info(node, replace(found, value=mark(found.value)))


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex

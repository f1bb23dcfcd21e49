"""Where faults can be planted, and a transform that believes in its fault."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
from torch import fx

from hgc.errors import ShardingError
from hgc.ir.derive import derive, found_placements
from hgc.ir.placement import Placement
from hgc.ir.program import Program
from hgc.ir.rules import make_call
from hgc.ir.value import Value, info, is_size, set_info
from hgc.ir.verifier import planning_hints

Fault: TypeAlias = Callable[[Program, random.Random], str]
"""Changes the program and says what it did; ``""`` if there is nothing of its kind to break."""


def graphs(program: Program) -> list[fx.Graph]:
    return [body.graph for body in program.bodies.values()]


def nodes(program: Program, *targets: Any) -> list[fx.Node]:
    return [n for graph in graphs(program) for n in graph.nodes if n.op == "call_function" and n.target in targets]


def pick(rng: random.Random, sites: list[Any]) -> Any:
    return rng.choice(sites) if sites else None


def value_of(node: fx.Node) -> Value | None:
    found = info(node).value
    return found if isinstance(found, Value) else None


def needs_gradient(node: fx.Node) -> bool:
    found = value_of(node)
    return found is not None and found.requires_grad


def source_of(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source


def own_arguments(node: fx.Node) -> tuple[Any, ...]:
    """A collective without its operand."""
    return (node.target, node.args[1:], tuple(node.kwargs.items()))


# -- a transform that believes in its fault -------------------------------------------------------------------------------------------


def record_again(program: Program) -> None:
    """Record everywhere what the rules say after the fault, as a transform would that made it in good faith."""
    hints = planning_hints(program, 4)
    for block in list(program.blocks()):
        body = program.body(block.body)
        placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
        for given, taken in zip(block.node.args, placeholders, strict=True):
            assert isinstance(given, fx.Node)
            _take_over(taken, value_of(given))
        for node in body.graph.nodes:
            if node.op == "call_function" and not is_size(node):
                _derive_again(node, program, hints)
            elif node.op == "output":
                results = tuple(value_of(n) for n in node.args[0])
                set_info(block.node, replace(info(block.node), value=tuple(v for v in results if v is not None)))
        for user in block.node.users:
            if user.target is operator.getitem:
                _take_over(user, info(block.node).value[user.args[1]])  # type: ignore[index]


def _take_over(node: fx.Node, value: Value | None) -> None:
    known = value_of(node)
    if known is not None and value is not None:
        set_info(node, replace(info(node), value=replace(known, placements=value.placements)))


def _derive_again(node: fx.Node, program: Program, hints: dict[sympy.Symbol, int]) -> None:
    known = info(node).value
    values = known if isinstance(known, tuple) else (known,)
    new: list[list[tuple[str, Placement]]] = [[] for _ in values]
    for axis in program.mesh:
        recorded = tuple(v.on(axis) for v in values if v is not None)
        if node.target is operator.getitem:
            derived: tuple[Placement, ...] = (info(source_of(node)).value[node.args[1]].on(axis),)  # type: ignore[index]
        else:
            try:
                derived = derive(node, make_call(node, axis, program.mesh, hints, found_placements(node, axis)), recorded)
            except (ShardingError, AssertionError):
                derived = recorded  # nothing is true here; the verifier shall say so
        for placements, placement in zip(new, derived, strict=True):
            placements.append((axis, placement))
    placed = tuple(replace(v, placements=tuple(p)) for v, p in zip(values, new, strict=True) if v is not None)
    set_info(node, replace(info(node), value=placed if isinstance(known, tuple) else placed[0]))

"""A vocabulary that ``tp`` does not divide is padded with rows of zeros that the loss does not see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import sympy
from torch import fx

from hgc.ir import ops
from hgc.ir.program import STATE, Program
from hgc.ir.rules.core import named_arguments, overloads
from hgc.ir.rules.rewrites import as_hgc_cross_entropy
from hgc.ir.sizes import SHAPE_ARGUMENT
from hgc.ir.value import Value, info, is_size, set_info
from hgc.passes.base import Transform
from hgc.passes.sharding.regions import before_loss, weight_of
from hgc.plan import Plan

_LOSSES = (*overloads("cross_entropy_loss"), ops.cross_entropy)
_LINEAR, _LOOKUP = overloads("linear")[0], overloads("embedding")[0]


@dataclass(frozen=True)
class PadVocabulary(Transform):
    """Pad the product in front of each cross entropy, and the tables tied to it, to a multiple of ``tp`` classes.

    The added rows are zero, are in no checkpoint, and get no gradient: ``cross_entropy(..., vocab_size=V)`` masks their columns. A weight
    that something else reads too is left alone (and then stays whole on every rank, which the report says).
    """

    name: ClassVar[str] = "pad-vocabulary"
    replaces_operators: ClassVar[bool] = True

    def applies(self, plan: Plan) -> bool:
        return plan.strategy.tp > 1 and plan.strategy.vocab_parallel

    def run(self, program: Program, plan: Plan) -> Program:
        for body in dict.fromkeys(block.body for block in program.blocks()):
            for node in list(program.body(body).graph.nodes):
                if node.target in _LOSSES:
                    _pad(program, body, node, plan.strategy.tp)
        return program

    def check(self, before: Program, after: Program) -> list[str]:
        """Numbers cannot be compared body by body, since shapes change; ``hgc verify`` compares the whole program."""
        padded = [s for s in after.state.values() if s.rows is not None]
        return [
            f"vocabulary {s.name!r} of {s.rows} rows is padded to {s.value.shape[0]}; the added rows are zero and masked" for s in padded
        ]


def _pad(program: Program, body: str, loss: fx.Node, ranks: int) -> None:
    between, starts = before_loss(loss)
    if len(starts) != 1 or starts[0].target is not _LINEAR:
        return
    (product,) = starts
    weight, bias = weight_of(product), named_arguments(product)["bias"]
    classes = _shape(product)[-1]
    if weight is None or weight is not named_arguments(product)["weight"] or int(classes) % ranks == 0:
        return
    names = {n for state in (weight, bias) if state is not None for n in _state_names(program, body, state)}
    padded = -(-int(classes) // ranks) * ranks
    if any(not _only_tables(program, name) for name in names):
        return
    for name in names:
        _resize_state(program, name, padded)
    for node in (product, *between):
        _resize(node, classes, padded)
    as_hgc_cross_entropy(loss)
    loss.update_kwarg("vocab_size", int(classes))
    program.body(body).recompile()


def _shape(node: fx.Node) -> tuple[Any, ...]:
    value = info(node).value
    assert isinstance(value, Value)
    return value.shape


def _state_names(program: Program, body: str, placeholder: fx.Node) -> set[str]:
    position = [n for n in program.body(body).graph.nodes if n.op == "placeholder"].index(placeholder)
    sources = [block.node.args[position] for block in program.blocks() if block.body == body]
    return {str(s.target).removeprefix(STATE) for s in sources if isinstance(s, fx.Node) and s.op == "get_attr"}


def _readers(program: Program, name: str) -> list[tuple[fx.Node, fx.Node]]:
    """(body placeholder, operator) pairs that read a state."""
    found: list[tuple[fx.Node, fx.Node]] = []
    for block in program.blocks():
        placeholders = [n for n in program.body(block.body).graph.nodes if n.op == "placeholder"]
        for placeholder, source in zip(placeholders, block.node.args, strict=True):
            if isinstance(source, fx.Node) and source.op == "get_attr" and source.target == STATE + name:
                found.extend((placeholder, user) for user in placeholder.users)
    return found


def _only_tables(program: Program, name: str) -> bool:
    """Is the state read by lookups and by one product only?"""
    users = {user for _, user in _readers(program, name)}
    return sum(u.target is _LINEAR for u in users) == 1 and all(u.target in (_LINEAR, _LOOKUP) for u in users)


def _resize_state(program: Program, name: str, padded: int) -> None:
    state = program.state[name]
    program.state[name] = replace(state, value=_resized(state.value, 0, padded), rows=int(state.value.shape[0]))
    for node in program.root.graph.nodes:
        if node.op == "get_attr" and node.target == STATE + name:
            _set(node, _resized(program.state[name].value, 0, padded))
    for placeholder, _ in _readers(program, name):
        _set(placeholder, program.state[name].value)


def _resize(node: fx.Node, classes: Any, padded: int) -> None:
    """Values between the product and the loss: the dim of ``classes`` grows, and so does a size argument that spells it."""
    if is_size(node):
        return
    for dim, size in enumerate(_shape(node)):
        if size == classes:
            value = info(node).value
            assert isinstance(value, Value)
            _set(node, _resized(value, dim, padded))
            if node.target in SHAPE_ARGUMENT:
                position = SHAPE_ARGUMENT[node.target]
                given = list(node.args[position])  # type: ignore[arg-type]
                given[dim] = padded if given[dim] == int(classes) else given[dim]
                node.update_arg(position, given)


def _resized(value: Value, dim: int, size: int) -> Value:
    return replace(value, shape=(*value.shape[:dim], sympy.Integer(size), *value.shape[dim + 1 :]))


def _set(node: fx.Node, value: Value) -> None:
    set_info(node, replace(info(node), value=value))

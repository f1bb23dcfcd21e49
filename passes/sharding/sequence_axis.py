"""Axes that split the sequence: context parallelism (ring attention) and Ulysses (sequence traded for heads).

Every activation is a share of the positions from the inputs on, parameters are whole and their gradients summed by the runtime, as on
the data axis. Only attention, and what else mixes positions, communicates.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import sympy
from torch import fx

from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.ops.exchange import key_value_repeats
from hgc.ir.placement import Placement, Replicated, Shard, zigzag
from hgc.ir.program import Block, Program
from hgc.ir.rules import cases, make_call, named_arguments
from hgc.ir.rules.attention import EXCHANGE, RING
from hgc.ir.value import is_size, value
from hgc.ir.verifier import planning_hints
from hgc.passes.base import Transform
from hgc.passes.sharding.attention_masks import mask_nodes
from hgc.passes.sharding.layout import AxisLayout
from hgc.passes.sharding.lower import Hints, lower_axis
from hgc.plan import Plan


@dataclass(frozen=True)
class ContextParallel(Transform):
    """Split the sequence over ``cp``; attention passes keys and values round (ring), in zigzag order if it is causal."""

    name: ClassVar[str] = "context-parallel"

    def applies(self, plan: Plan) -> bool:
        return plan.strategy.cp > 1

    def run(self, program: Program, plan: Plan) -> Program:
        return _lowered(program, plan, "cp", plan.strategy.cp, RING)


@dataclass(frozen=True)
class Ulysses(Transform):
    """Split the sequence over ``sp``; attention trades its share of the positions for a share of the heads."""

    name: ClassVar[str] = "ulysses"

    def applies(self, plan: Plan) -> bool:
        return plan.strategy.sp > 1

    def run(self, program: Program, plan: Plan) -> Program:
        return _lowered(program, plan, "sp", plan.strategy.sp, EXCHANGE)


def _lowered(program: Program, plan: Plan, axis: str, size: int, method: str) -> Program:
    hints = planning_hints(program, plan.devices)
    notes = _check_heads(program, size, plan.strategy.tp) if method == EXCHANGE else []
    layout, more = sequence_layout(program, axis, size, method, hints)
    lowered = lower_axis(program, layout, hints)
    lowered.report.extend([*notes, *more])
    return lowered


def sequence_layout(program: Program, axis: str, size: int, method: str, hints: Hints) -> tuple[AxisLayout, list[str]]:
    """Every input with a sequence dim split along it, and sentences about those that are not.

    Raises :class:`~hgc.errors.ShardingError` if no input has one.
    """
    symbols = sequence_symbols(program)
    in_zigzag = method == RING and has_causal_attention(program)
    mesh = {**program.mesh, axis: size}
    masks = mask_nodes(program)
    inputs: dict[str, Placement] = {}
    notes: list[str] = []
    for node in program.inputs():
        dim = next((d for d, length in enumerate(value(node).shape) if length in symbols), None)
        if dim is None:
            continue
        shard = Shard(dim, zigzag(1)) if in_zigzag else Shard(dim)
        if ("", node.name) in masks:
            notes.append(f"every rank of {axis!r} gets the whole input {str(node.target)!r}: attention masks are made of it")
        elif all(_can_take(reader, taken, shard, axis, mesh, hints) for reader, taken in _readers(program, node)):
            inputs[node.name] = shard
        else:
            notes.append(f"every rank of {axis!r} gets the whole input {str(node.target)!r}: the model reads it across positions")
    if not inputs:
        raise ShardingError(
            f"{axis} is {size}, but no input of the model has a sequence dim that tracing kept symbolic; "
            f"name it with dynamic={{'input': {{1: 's'}}}} or use {axis}=1"
        )
    layout = AxisLayout(
        axis, size, Replicated(), inputs, divided=frozenset(symbols), zigzag=in_zigzag, methods=frozenset({method}), masks=masks
    )
    return layout, notes


def sequence_symbols(program: Program) -> set[sympy.Symbol]:
    """Symbols that count positions: those called sequence, and those of integers and masks that are not the batch."""
    found: set[sympy.Symbol] = {symbol for symbol, known in program.symbols.items() if known.meaning == "sequence"}
    for node in program.inputs():
        if not value(node).dtype.is_floating_point:
            found |= {s for s in value(node).shape if s in program.symbols and program.symbols[s].meaning != "batch"}
    return found


def has_causal_attention(program: Program) -> bool:
    """Then ranks with late positions have more to do, unless each has early ones as well."""
    symbols = sequence_symbols(program)
    return any(given["causal"] and _length(given["q"]) in symbols for _, given in _attentions(program))


def _attentions(program: Program) -> Iterator[tuple[Block, dict[str, fx.Node]]]:
    for block in program.blocks():
        for node in program.body(block.body).graph.nodes:
            if node.target is ops.attention:
                yield block, named_arguments(node)


def _length(node: fx.Node) -> sympy.Expr:
    return value(node).shape[2]


def _readers(program: Program, root_input: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Operators that read a program input, each with the placeholder that it reads it from."""
    for call in root_input.users:
        if call.op != "call_module":
            continue
        taken = [n for n in program.body(str(call.target).removeprefix("bodies.")).graph.nodes if n.op == "placeholder"]
        for argument, placeholder in zip(call.args, taken, strict=True):
            if argument is root_input:
                yield from ((user, placeholder) for user in placeholder.users if user.op != "output" and not is_size(user))


def _can_take(reader: fx.Node, taken: fx.Node, shard: Shard, axis: str, mesh: dict[str, int], hints: Hints) -> bool:
    """Has the operator a rule for the input in this shard?"""
    call = make_call(reader, axis, mesh, hints, {taken: shard})
    position = next(o.index for o in call.operands if o.node is taken)
    return any(case.inputs[position] == shard for case in cases(call))


def _check_heads(program: Program, size: int, tp: int) -> list[str]:
    """Raise if a rank would get no whole number of heads; sentences about key-value heads that are sent more than once."""
    notes: dict[str, None] = {}
    symbols = sequence_symbols(program)
    for block, given in _attentions(program):
        if _length(given["q"]) not in symbols:
            continue
        heads, key_value = (int(value(given[name]).shape[1]) for name in ("q", "k"))
        share = heads // tp if heads % tp == 0 else heads
        if share % size:
            possible = ", ".join(str(n) for n in range(1, share + 1) if share % n == 0)
            each = f", {share} on each of {tp} tensor-parallel ranks" if tp > 1 else ""
            raise ShardingError(
                f"attention of {block.path or block.body} has {heads} heads{each}, which sp={size} does not divide; "
                f"possible sp sizes: {possible}"
            )
        repeats = key_value_repeats(key_value // tp if key_value % tp == 0 else key_value, size)
        if repeats > 1:
            notes[f"attention has {key_value} key-value heads: each is sent to {repeats} ranks of 'sp'"] = None
    return list(notes)

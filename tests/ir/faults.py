"""Faults of placements, sizes and operands.

Every fault changes what some rank computes, or what some gradient is. What would be neutral is left out where a site is chosen, and the
comment there says why.
"""

from __future__ import annotations

import operator
import random
from dataclasses import replace
from typing import Any

from torch import fx

from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard
from hgc.ir.program import Program
from hgc.ir.rules.collectives import COLLECTIVES
from hgc.ir.rules.core import named_arguments
from hgc.ir.sizes import SHAPE_ARGUMENT, SLICE, SPLITS, SYM_SIZE
from hgc.ir.value import Value, info, is_size, set_info
from tests.ir.fault_sites import Fault, graphs, needs_gradient, nodes, pick, source_of, value_of

# -- placements -----------------------------------------------------------------------------------------------------------------------


def _replace_last(value: Value, placements: tuple[tuple[str, Placement], ...]) -> Value:
    return replace(value, placements=placements)


def drop_placement(program: Program, rng: random.Random) -> str:
    """Of a parameter: in the list of state, where the root reads it, or where a body takes it."""
    name = rng.choice(sorted(program.state))
    entry = program.state[name]
    kept = entry.value.placements[:-1]
    where = rng.choice(["state", "root", "body"])
    if where == "state":
        program.state[name] = replace(entry, value=_replace_last(entry.value, kept))
        return f"state {name} lost its last placement"
    if where == "root":
        node = rng.choice([n for n in program.root.graph.nodes if n.op == "get_attr"])
    else:
        node = rng.choice([n for graph in graphs(program) for n in graph.nodes if n.op == "placeholder"])
    set_info(node, replace(info(node), value=_replace_last(value_of(node), value_of(node).placements[:-1])))  # type: ignore[arg-type, union-attr]
    return f"{where} node {node.name} lost its last placement"


def _other(placement: Placement, rank: int, rng: random.Random) -> Placement:
    options: list[Placement] = [Invariant(), Replicated(), Partial(), *(Shard(dim) for dim in range(rank))]
    return rng.choice([p for p in options if p != placement])


def misplace_parameter(program: Program, rng: random.Random) -> str:
    """In the list of state and where the root reads it, but not where the body takes it."""
    name = rng.choice(sorted(n for n in program.state if program.state[n].value.requires_grad))
    found = program.state[name].value
    (axis, placement), at = found.placements[-1], len(found.placements) - 1
    new = (*found.placements[:at], (axis, _other(placement, len(found.shape), rng)))
    program.state[name] = replace(program.state[name], value=replace(found, placements=new))
    for node in program.root.graph.nodes:
        if node.op == "get_attr" and node.target == f"state.{name}":
            set_info(node, replace(info(node), value=program.state[name].value))
    return f"{name} is {new[at][1]} on {axis}, was {placement}"


def misrecord(program: Program, rng: random.Random) -> str:
    """A value in a body. Kinds matter where a gradient flows, so only such values are chosen."""
    node = pick(rng, [n for graph in graphs(program) for n in graph.nodes if n.op != "output" and not is_size(n) and needs_gradient(n)])
    if node is None:
        return ""
    found = value_of(node)
    assert found is not None
    at = rng.randrange(len(found.placements))
    axis, placement = found.placements[at]
    new = _other(placement, len(found.shape), rng)
    set_info(node, replace(info(node), value=replace(found, placements=(*found.placements[:at], (axis, new), *found.placements[at + 1 :]))))
    return f"{node.name} is recorded as {new} on {axis}, was {placement}"


# -- sizes ----------------------------------------------------------------------------------------------------------------------------


def change_shape(program: Program, rng: random.Random) -> str:
    """One entry of a shape argument becomes another number. (Writing -1 for a size, or the size for -1, would be neutral.)"""
    node = pick(rng, [n for n in nodes(program, *SHAPE_ARGUMENT) if n.args[SHAPE_ARGUMENT[n.target]]])
    if node is None:
        return ""
    position = SHAPE_ARGUMENT[node.target]
    sizes = list(node.args[position])
    at = rng.randrange(len(sizes))
    sizes[at] = 2 * sizes[at] if isinstance(sizes[at], int) and sizes[at] > 0 else 3
    node.update_arg(position, sizes)
    return f"size {at} of {node.name} is {sizes[at]}"


def global_shape(program: Program, rng: random.Random) -> str:
    """The shape as on a single device, where a rank holds less."""
    sites = []
    for node in nodes(program, *SHAPE_ARGUMENT):
        value, given = value_of(node), node.args[SHAPE_ARGUMENT[node.target]]
        assert value is not None
        local = value.local_shape(dict(program.mesh))
        sites += [
            (node, i, int(s))
            for i, (s, own) in enumerate(zip(value.shape, local, strict=True))
            if s.is_Integer and s != own and given[i] != -1
        ]
    found = pick(rng, sites)
    if found is None:
        return ""
    node, at, size = found
    position = SHAPE_ARGUMENT[node.target]
    node.update_arg(position, [size if i == at else s for i, s in enumerate(node.args[position])])
    return f"size {at} of {node.name} is the global {size}"


def change_pieces(program: Program, rng: random.Random) -> str:
    node = pick(rng, nodes(program, *SPLITS))
    if node is None:
        return ""
    given = node.args[1]
    node.update_arg(1, given + 1 if isinstance(given, int) else [given[0] + 1, *given[1:-1], given[-1] - 1])
    return f"pieces of {node.name} are {node.args[1]}"


def change_slice(program: Program, rng: random.Random) -> str:
    sites = [
        n for n in nodes(program, SLICE) if isinstance(named_arguments(n)["start"], int) and isinstance(named_arguments(n)["end"], int)
    ]
    node = pick(rng, sites)
    if node is None:
        return ""
    node.update_arg(2, node.args[2] + 1)
    return f"{node.name} starts at {node.args[2]}"


def change_size_node(program: Program, rng: random.Random) -> str:
    """A factor, or the dim that is read; a dim of the same size would be neutral."""
    sites: list[tuple[fx.Node, int, Any]] = []
    for node in nodes(program, operator.mul, operator.floordiv, operator.add):
        sites += [(node, i, a + 1) for i, a in enumerate(node.args) if isinstance(a, int)]
    for node in nodes(program, SYM_SIZE):
        shape = value_of(source_of(node)).local_shape(dict(program.mesh))  # type: ignore[union-attr]
        sites += [(node, 1, dim) for dim, size in enumerate(shape) if size != shape[node.args[1]]]  # type: ignore[index]
    found = pick(rng, sites)
    if found is None:
        return ""
    node, at, new = found
    node.update_arg(at, new)
    return f"size {node.name} is computed with {new}"


# -- operands and blocks --------------------------------------------------------------------------------------------------------------


def swap_parameters(program: Program, rng: random.Random) -> str:
    """Two different parameters of one call of a block."""
    sites = []
    for block in program.blocks():
        given = [i for i, a in enumerate(block.node.args) if isinstance(a, fx.Node) and a.op == "get_attr"]
        sites += [(block.node, i, j) for i in given for j in given if i < j and block.node.args[i] is not block.node.args[j]]
    found = pick(rng, sites)
    if found is None:
        return ""
    node, i, j = found
    first, second = node.args[i], node.args[j]
    node.update_arg(i, second)
    node.update_arg(j, first)
    return f"{node.name} got {first} and {second} in each other's place"


def other_operand(program: Program, rng: random.Random) -> str:
    """An operator reads another value that is placed alike."""
    sites = []
    for graph in graphs(program):
        before: list[fx.Node] = []
        for node in graph.nodes:
            if node.op == "call_function" and not is_size(node):
                for operand in (n for n in node.all_input_nodes if value_of(n) is not None):
                    alike = [
                        b for b in before if b is not operand and value_of(b) == value_of(operand) and _behind(b) is not _behind(operand)
                    ]
                    sites += [(node, operand, b) for b in alike if node.users]  # what nobody reads may be anything
            if node.op != "output" and not is_size(node) and value_of(node) is not None:
                before.append(node)
    found = pick(rng, sites)
    if found is None:
        return ""
    node, operand, other = found
    node.replace_input_with(operand, other)
    return f"{node.name} reads {other.name} for {operand.name}"


def _behind(node: fx.Node) -> fx.Node:
    """The value that was moved: two redistributions of one value are the same value."""
    while node.target in COLLECTIVES:
        node = source_of(node)
    return node


OTHER_FAULTS: tuple[Fault, ...] = (
    drop_placement,
    misplace_parameter,
    misrecord,
    change_shape,
    global_shape,
    change_pieces,
    change_slice,
    change_size_node,
    swap_parameters,
    other_operand,
)

"""Faults to plant into a lowered program.

Every fault changes what some rank computes, or what some gradient is. What would be neutral is left out where a site is chosen, and the
comment there says why.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
from torch import fx

from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.derive import derive, found_placements
from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard, is_whole
from hgc.ir.program import BODIES, Program
from hgc.ir.rules import make_call
from hgc.ir.rules.collectives import COLLECTIVES
from hgc.ir.rules.core import append_axis, named_arguments
from hgc.ir.sizes import SHAPE_ARGUMENT, SLICE, SPLITS, SYM_SIZE
from hgc.ir.value import Value, info, is_size, set_info
from hgc.ir.verifier import planning_hints

Fault: TypeAlias = Callable[[Program, random.Random], str]
"""Changes the program and says what it did; ``""`` if there is nothing of its kind to break."""

_WITH_DIM = (ops.all_gather, ops.all_gather_i, ops.reduce_scatter, ops.shard, ops.shard_r)
_TWINS = (
    {ops.all_gather, ops.all_gather_i},
    {ops.all_reduce, ops.all_reduce_r},
    {ops.shard, ops.shard_r},
    {ops.copy_in, ops.as_invariant},
    {ops.copy_in, ops.as_partial},
)
"""Pairs that differ in the kinds of replication or in the gradient only."""


# -- where to strike ------------------------------------------------------------------------------------------------------------------


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


# -- collectives ----------------------------------------------------------------------------------------------------------------------


def delete(program: Program, rng: random.Random) -> str:
    node = pick(rng, nodes(program, *COLLECTIVES))
    if node is None:
        return ""
    node.replace_all_uses_with(source_of(node))
    node.graph.erase_node(node)
    return f"deleted {node.name}"


def delete_copy(program: Program, rng: random.Random) -> str:
    node = pick(rng, nodes(program, ops.copy_in, ops.as_partial))
    if node is None:
        return ""
    node.replace_all_uses_with(source_of(node))
    node.graph.erase_node(node)
    return f"deleted {node.name}"


def delete_last_sum(program: Program, rng: random.Random) -> str:
    """The sums of the loss come last in the last body."""
    last = graphs(program)[-1]
    sums = [n for n in last.nodes if n.target is ops.all_reduce]
    if not sums:
        return ""
    sums[-1].replace_all_uses_with(source_of(sums[-1]))
    last.erase_node(sums[-1])
    return f"deleted the last {sums[-1].name}"


def duplicate(program: Program, rng: random.Random) -> str:
    """Once more on its own result. Beside it, on the same operand, would be neutral: a second copy of the same value."""
    node = pick(rng, nodes(program, *COLLECTIVES))
    if node is None:
        return ""
    with node.graph.inserting_after(node):
        again = node.graph.call_function(node.target, node.args, node.kwargs)
    node.replace_all_uses_with(again)
    again.update_arg(0, node)
    again.meta = dict(node.meta)
    return f"duplicated {node.name}"


def change_kind(program: Program, rng: random.Random) -> str:
    """Only where a gradient flows: without one both members of a pair do the same."""
    sites = [n for n in nodes(program, *COLLECTIVES) if needs_gradient(n) and any(n.target in pair for pair in _TWINS)]
    node = pick(rng, sites)
    if node is None:
        return ""
    other = rng.choice([t for pair in _TWINS if node.target in pair for t in sorted(pair - {node.target}, key=lambda t: t.__name__)])
    was, node.target = node.target, other
    return f"{was.__name__} {node.name} is {other.__name__}"


def change_operator(program: Program, rng: random.Random) -> str:
    """A sum where a scatter was, and so on: same operand, same axis, another result."""
    node = pick(rng, [n for n in nodes(program, ops.all_reduce, ops.reduce_scatter, *_WITH_DIM[:2]) if value_of(n).shape])  # type: ignore[union-attr]
    if node is None:
        return ""
    axis, dim = named_arguments(node)["axis"], named_arguments(node).get("dim", 0)
    choices = [ops.all_reduce, ops.reduce_scatter, ops.all_gather, ops.copy_in]
    if not needs_gradient(node):
        choices.remove(ops.all_gather)  # the same as all_gather_i there
    target = rng.choice([t for t in choices if t is not node.target and not {t, node.target} <= {ops.all_gather, ops.all_gather_i}])
    was, node.target = node.target, target
    node.args, node.kwargs = (source_of(node), *((dim,) if target in _WITH_DIM else ()), axis), {}
    return f"{was.__name__} {node.name} is {target.__name__}"


def change_dim(program: Program, rng: random.Random) -> str:
    sites = [n for n in nodes(program, *_WITH_DIM) if len(value_of(n).shape) > 1]  # type: ignore[union-attr]
    node = pick(rng, sites)
    if node is None:
        return ""
    rank = len(value_of(node).shape)  # type: ignore[union-attr]
    dim = rng.choice([d for d in range(rank) if d != node.args[1]])
    node.update_arg(1, dim)
    return f"dim of {node.name} is {dim}"


def change_parts(program: Program, rng: random.Random) -> str:
    node = pick(rng, nodes(program, ops.all_gather, ops.all_gather_i, ops.shard, ops.shard_r))
    if node is None:
        return ""
    node.kwargs = {"parts": 2 if node.kwargs.get("parts", 1) == 1 else 1}
    return f"parts of {node.name} are {node.kwargs['parts']}"


def reverse_exchange(program: Program, rng: random.Random) -> str:
    node = pick(rng, nodes(program, ops.all_to_all))
    if node is None:
        return ""
    source, src, dst, axis = node.args
    node.args = (source, dst, src, axis)
    return f"reversed {node.name}"


def change_axis(program: Program, rng: random.Random) -> str:
    node = pick(rng, nodes(program, *COLLECTIVES) if len(program.mesh) > 1 else [])
    if node is None:
        return ""
    axis = next(a for a in program.mesh if a != node.args[-1])
    node.update_arg(len(node.args) - 1, axis)
    return f"axis of {node.name} is {axis}"


def _pairs(program: Program) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Two collectives of a body, of which each could come in the other's place."""
    for graph in graphs(program):
        order = {n: i for i, n in enumerate(graph.nodes)}
        found = [n for n in graph.nodes if n.target in COLLECTIVES]
        yield from ((a, b) for i, a in enumerate(found) for b in found[i + 1 :] if order[source_of(b)] < order[a])


def swap_operands(program: Program, rng: random.Random) -> str:
    """Of two collectives with different operands; with the same one nothing would change."""
    found = pick(rng, [(a, b) for a, b in _pairs(program) if source_of(a) is not source_of(b)])
    if found is None:
        return ""
    a, b = found
    first, second = source_of(a), source_of(b)
    a.update_arg(0, second)
    b.update_arg(0, first)
    return f"swapped the operands of {a.name} and {b.name}"


def swap_collectives(program: Program, rng: random.Random) -> str:
    """Each takes the other's place, operand and users; two alike would change nothing."""
    found = pick(rng, [(a, b) for a, b in _pairs(program) if own_arguments(a) != own_arguments(b)])
    if found is None:
        return ""
    a, b = found
    (a.target, first, a.kwargs), (b.target, second, b.kwargs) = own_arguments_of(b), own_arguments_of(a)
    a.args, b.args = (source_of(a), *first), (source_of(b), *second)
    return f"swapped {a.name} and {b.name}"


def own_arguments_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return node.target, node.args[1:], dict(node.kwargs)


# -- operators that name axes ---------------------------------------------------------------------------------------------------------


def forget_axis(program: Program, rng: random.Random) -> str:
    sites = [
        (n, name)
        for n in nodes(program, ops.cross_entropy, ops.mean, ops.dropout)
        for name in n.kwargs
        if name.endswith("_axes") and n.kwargs[name]
    ]
    found = pick(rng, sites)
    if found is None:
        return ""
    node, name = found
    node.update_kwarg(name, node.kwargs[name][:-1])
    return f"{name} of {node.name} lacks its last axis"


def forget_vocabulary(program: Program, rng: random.Random) -> str:
    node = pick(rng, [n for n in nodes(program, ops.cross_entropy) if n.kwargs.get("vocab_axis")])
    if node is None:
        return ""
    node.update_kwarg("vocab_axis", None)
    return f"{node.name} has no vocabulary axis"


def name_wrong_axis(program: Program, rng: random.Random) -> str:
    """An axis on which nothing is sharded: its parts would be counted twice, or its masks differ."""
    sites = [n for n in nodes(program, ops.cross_entropy, ops.mean) for axis in program.mesh if axis not in n.kwargs.get("batch_axes", ())]
    node = pick(rng, sites)
    if node is None:
        return ""
    axis = next(axis for axis in program.mesh if axis not in node.kwargs.get("batch_axes", ()))
    append_axis("batch_axes")(node, axis, program.mesh[axis])
    return f"{node.name} has rows on {axis}"


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


COLLECTIVE_FAULTS: tuple[Fault, ...] = (
    delete,
    delete_copy,
    delete_last_sum,
    duplicate,
    change_kind,
    change_operator,
    change_dim,
    change_parts,
    reverse_exchange,
    change_axis,
    swap_operands,
    swap_collectives,
    forget_axis,
    forget_vocabulary,
    name_wrong_axis,
)
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


__all__ = ["BODIES", "COLLECTIVE_FAULTS", "OTHER_FAULTS", "Fault", "graphs", "is_whole", "record_again"]

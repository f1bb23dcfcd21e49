"""Faults of collectives and of operators that name axes.

Every fault changes what some rank computes, or what some gradient is. What would be neutral is left out where a site is chosen, and the
comment there says why.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from torch import fx

from hgc.ir import ops
from hgc.ir.program import Program
from hgc.ir.rules.collectives import COLLECTIVES
from hgc.ir.rules.core import append_axis, named_arguments
from tests.ir.fault_sites import Fault, graphs, needs_gradient, nodes, own_arguments, pick, source_of, value_of

_WITH_DIM = (ops.all_gather, ops.all_gather_i, ops.reduce_scatter, ops.shard, ops.shard_r)
_TWINS = (
    {ops.all_gather, ops.all_gather_i},
    {ops.all_reduce, ops.all_reduce_r},
    {ops.shard, ops.shard_r},
    {ops.copy_in, ops.as_invariant},
    {ops.copy_in, ops.as_partial},
)
"""Pairs that differ in the kinds of replication or in the gradient only."""


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

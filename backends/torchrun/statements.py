"""From the nodes of a body to statements: which values get a variable, which are written inside their only use, which are dropped."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import fx

from hgc.backends.torchrun.names import words
from hgc.backends.torchrun.naming import LOSSES
from hgc.backends.torchrun.operators import is_pure
from hgc.ir import ops
from hgc.ir.printing import is_collective
from hgc.ir.value import info, is_size

LONGEST = 92
"""Characters of a statement whose operands are written inside it."""

_VIEWS = words(
    """
    reshape view transpose permute expand unsqueeze squeeze flatten select slice to float chunk split unbind split_with_sizes
    getitem t movedim
    """
)
_CHEAP = _VIEWS | words(
    """
    add sub mul div neg pow rsqrt sqrt reciprocal square abs rsub silu gelu relu tanh sigmoid cos sin exp log eq ne lt le gt ge
    bitwise_and bitwise_or bitwise_not logical_and logical_or logical_not cat stack arange full ones zeros masked_fill clamp
    clamp_min clamp_max where pad softmax index_select minimum maximum full_like zeros_like ones_like type_as contiguous clone
    repeat constant_pad_nd copy_in as_invariant triu tril any all new_ones new_zeros scalar_tensor
    """
)


_SUMS = words("add sub mul div matmul rsub bitwise_and bitwise_or")
_SHORT = 40
"""Characters of ``name = a + b`` up to which ``a + b`` may be the operand of a call."""


@dataclass(frozen=True)
class Statement:
    """``results = node``: the node itself, or one result for each output of an operator with several (``None``: not used)."""

    node: fx.Node
    results: tuple[fx.Node | None, ...]


@dataclass(frozen=True)
class Layout:
    """Statements in order, and the nodes that are written inside them."""

    statements: tuple[Statement, ...]
    inlined: frozenset[fx.Node]


def lay_out(
    graph: fx.Graph, outputs: Iterable[fx.Node], stem: Callable[[fx.Node], str], length: Callable[[fx.Node, set[fx.Node]], int]
) -> Layout:
    """``length(node, inlined)`` is the number of characters of a node's statement if ``inlined`` values are written inside their use."""
    kept = _live(graph, list(outputs))
    nodes = _in_order([n for n in graph.nodes if n in kept and n.op == "call_function" and not is_size(n)])
    returned = set(outputs)
    pieces = {n: _pieces(n, kept) for n in nodes if isinstance(info(n).value, tuple)}
    unpacked = {piece for found in pieces.values() if found for piece in found}
    barrier = {n: sum(not is_pure(m) for m in nodes[:i]) for i, n in enumerate(nodes)}
    inlined: set[fx.Node] = set()
    single = {node: sorted(_single_uses(node, kept) - returned - unpacked, key=nodes.index) for node in nodes if node not in unpacked}
    for node, operands in single.items():
        for operand in operands:
            if not _reads_well(operand, node, stem, barrier) or length(node, inlined | {operand}) > LONGEST:
                continue
            if stem(node) in _SUMS or stem(operand) not in _SUMS or length(operand, inlined) <= _SHORT:
                inlined.add(operand)
    for node, operands in single.items():
        for operand in operands:
            chained = operand not in inlined and _starts_chain(operand, node, stem, barrier)
            if chained and length(_statement_of(node, inlined), inlined | {operand}) <= LONGEST:
                inlined.add(operand)
    statements = [Statement(n, tuple(pieces[n] or ()) if pieces.get(n) else (n,)) for n in nodes if n not in inlined and n not in unpacked]
    return Layout(tuple(statements), frozenset(inlined))


def _in_order(nodes: list[fx.Node]) -> list[fx.Node]:
    """Graph order, but a collective stands behind the only value it is made from and for: that frees the larger of the two."""
    following = {n.all_input_nodes[0]: n for n in nodes if is_collective(n) and len(n.all_input_nodes[0].users) == 1}
    moved = set(following.values())
    ordered: list[fx.Node] = []
    for node in nodes:
        if node not in moved or node.all_input_nodes[0].op == "placeholder":
            ordered.append(node)
            while node in following:
                node = following[node]
                ordered.append(node)
    return ordered


def _live(graph: fx.Graph, outputs: list[fx.Node]) -> set[fx.Node]:
    """Nodes that an output needs, or that change a tensor."""
    live: set[fx.Node] = set()
    pending = outputs + [n for n in graph.nodes if n.op == "call_function" and not is_size(n) and not is_pure(n) and _is_mutable(n)]
    while pending:
        node = pending.pop()
        if node not in live:
            live.add(node)
            pending.extend(node.all_input_nodes)
    return live


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return node.target is ops.batch_norm or (schema is not None and schema.is_mutable)


def _pieces(node: fx.Node, kept: set[fx.Node]) -> list[fx.Node | None] | None:
    """The outputs of an operator with several, by position; ``None`` if it is used otherwise than through them."""
    values = info(node).value
    assert isinstance(values, tuple)
    users = [user for user in node.users if user in kept]
    found: list[fx.Node | None] = [None] * len(values)
    for user in users:
        index = user.args[1] if getattr(user.target, "__name__", "") == "getitem" and len(user.args) == 2 else None
        if not isinstance(index, int) or not -len(values) <= index < len(values) or found[index] is not None:
            return None
        found[index] = user
    return found if len(users) > 1 or len(values) > 1 else None


def _single_uses(node: fx.Node, kept: set[fx.Node]) -> set[fx.Node]:
    """Operands that nothing else uses, and that this node uses once."""
    uses: dict[fx.Node, int] = {}

    def count(operand: fx.Node) -> fx.Node:
        uses[operand] = uses.get(operand, 0) + 1
        return operand

    fx.map_arg((node.args, node.kwargs), count)
    alone = {x for x, times in uses.items() if times == 1 and sum(user in kept for user in x.users) == 1}
    return {x for x in alone if x.op == "call_function" and not is_size(x)}


def _may_move(operand: fx.Node, user: fx.Node, barrier: dict[fx.Node, int]) -> bool:
    return is_pure(operand) and barrier[operand] == barrier[user] and not isinstance(info(operand).value, tuple)


def _reads_well(operand: fx.Node, user: fx.Node, stem: Callable[[fx.Node], str], barrier: dict[fx.Node, int]) -> bool:
    """Is the operand a small thing, whose name would say no more than its source?"""
    if not _may_move(operand, user, barrier):
        return False
    if is_collective(operand):
        return operand.target in (ops.copy_in, ops.as_invariant)
    if is_collective(user):
        return stem(operand) in _VIEWS
    if stem(user) in LOSSES and user.args[0] is operand:
        return False
    return stem(operand) in _CHEAP


def _starts_chain(operand: fx.Node, user: fx.Node, stem: Callable[[fx.Node], str], barrier: dict[fx.Node, int]) -> bool:
    """May ``F.linear(...)`` stand in front of ``.reshape(...).transpose(...)``?"""
    return _may_move(operand, user, barrier) and not is_collective(operand) and stem(user) in _VIEWS and operand is user.all_input_nodes[0]


def _statement_of(node: fx.Node, inlined: set[fx.Node]) -> fx.Node:
    while node in inlined:
        (node,) = node.users
    return node

"""Gather the small operators of a body into boxes: a normalisation or a rotary embedding is one box, not ten."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from hgc.backends.graphviz.naming import is_collective, is_getitem, operator_name
from hgc.ir.value import info, is_size, value

HEAVY = ("linear", "matmul", "bmm", "mm", "attention", "norm", "dropout", "entropy", "embedding", "conv", "pool", "moe", "grouped")


@dataclass(frozen=True)
class Group:
    """Operators drawn as one box; only the last one's value leaves it, so that drawing groups never makes a cycle."""

    nodes: tuple[fx.Node, ...]

    @property
    def last(self) -> fx.Node:
        return self.nodes[-1]

    @property
    def path(self) -> str:
        return info(self.last).path


def groups(body: fx.GraphModule) -> list[Group]:
    """Every operator of a body in exactly one group, in order; size computations and tuple accesses are left out."""
    members: dict[fx.Node, list[fx.Node]] = {}
    for node in body.graph.nodes:
        if is_operator(node):
            absorbed = [m for source in inputs(node) if source in members and _joins(source, node) for m in members.pop(source)]
            members[node] = [*absorbed, node]
    order = {node: place for place, node in enumerate(body.graph.nodes)}
    return [Group(tuple(sorted(nodes, key=order.__getitem__))) for nodes in members.values()]


def is_operator(node: fx.Node) -> bool:
    return node.op == "call_function" and not is_size(node) and not _is_access(node)


def inputs(node: fx.Node) -> list[fx.Node]:
    """The tensors a node reads, tuple accesses looked through, each once and in order."""
    return list(dict.fromkeys(_behind(source) for source in node.all_input_nodes if not is_size(source)))


def is_state(node: fx.Node) -> bool:
    return node.op == "placeholder" and info(node).role in ("parameter", "buffer")


def _behind(node: fx.Node) -> fx.Node:
    while _is_access(node):
        (node,) = node.all_input_nodes[:1]
    return node


def _is_access(node: fx.Node) -> bool:
    return is_getitem(node) and isinstance(info(node.all_input_nodes[0]).value, tuple)


def _joins(source: fx.Node, user: fx.Node) -> bool:
    readers = [reader for reader in source.users if reader.op == "output" or not is_size(reader)]
    if readers != [user] or is_collective(source) or _is_heavy(source):
        return False
    if is_collective(user) or _is_heavy(user):
        return all(is_state(node) for node in inputs(source))
    return info(source).path == info(user).path


def _is_heavy(node: fx.Node) -> bool:
    if any(word in operator_name(node) for word in HEAVY):
        return True
    return any(is_state(source) and len(value(source).shape) > 1 for source in inputs(node))

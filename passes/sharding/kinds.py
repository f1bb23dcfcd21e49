"""Settle the two kinds of whole values after placement: which are invariant, which replicated, and where ``copy_in`` goes.

A whole value may be ``Replicated`` (partial gradient) only if it can sum that gradient at its source: an ``all_gather`` whose backward is
a reduce-scatter, or a deferred parameter that the runtime synchronises. Every other whole value is ``Invariant``
and passes one ``copy_in`` in front of the operators that return partial gradients.
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any

from torch import fx

from hgc.ir import ops
from hgc.ir.placement import Invariant, Placement, Replicated, is_whole
from hgc.ir.value import info, is_size, set_info

Placements = dict[fx.Node, Placement | tuple[Placement, ...]]


def settle_kinds(graph: fx.Graph, axis: str, placements: Placements, moves: set[fx.Node]) -> None:
    """Replace whole placements by their kinds, choose the kinds of the redistributions in ``moves``, insert copies."""
    _Kinds(graph, axis, placements, moves).run()


class _Kinds:
    def __init__(self, graph: fx.Graph, axis: str, placements: Placements, moves: set[fx.Node]) -> None:
        self.graph, self.axis, self.placements, self.moves = graph, axis, placements, moves
        self.deferred: dict[fx.Node, bool] = {}
        self.summable: dict[fx.Node, bool] = {}
        self.order = list(graph.nodes)

    def run(self) -> None:
        for node in self.order:
            self._forward(node)
        for node in reversed(self.order):
            if self._settles(node):
                self._settle(node)
        for node in self.moves:
            self._choose_slice(node)

    def _forward(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            self.deferred[node] = self.summable[node] = self.placements[node] == Replicated()
            return
        sources = [n for n in node.all_input_nodes if self._needs_gradient(n)]
        whole = bool(sources) and all(self._whole(n) for n in sources) and self._whole(node)
        self.deferred[node] = whole and all(self.deferred[n] for n in sources)
        self.summable[node] = (node.target is ops.all_gather and node in self.moves) or (whole and all(self.summable[n] for n in sources))

    def _needs_gradient(self, node: fx.Node) -> bool:
        if node.op == "output" or is_size(node):
            return False
        value = info(node).value
        return any(v.requires_grad for v in (value if isinstance(value, tuple) else (value,)) if v is not None)

    def _whole(self, node: fx.Node) -> bool:
        found = self.placements.get(node)
        return is_whole(found[0] if isinstance(found, tuple) else found) if found is not None else False

    def _settles(self, node: fx.Node) -> bool:
        """Every whole value with a gradient; the pieces of a split are settled with the split."""
        return node.op != "output" and self._whole(node) and self._needs_gradient(node) and not self._is_piece(node)

    def _is_piece(self, node: fx.Node) -> bool:
        return node.target is operator.getitem

    def _settle(self, node: fx.Node) -> None:
        values = self._pieces(node) if isinstance(info(node).value, tuple) else [node]
        uses = [(value, user, self._use(value, user)) for value in values for user in value.users]
        partial = [u for u in uses if u[2] == "partial"]
        invariant = [u for u in uses if u[2] == "invariant"]
        kind = self._kind(node, bool(partial), bool(invariant))
        for value in {node, *values}:
            self._place(value, kind)
        if node in self.moves and node.target is ops.all_gather and kind == Invariant():
            node.target = ops.all_gather_i
        wrong, copy = (invariant, ops.as_invariant) if kind == Replicated() else (partial, ops.copy_in)
        for value in values:
            self._insert(value, [user for v, user, _ in wrong if v is value], copy)

    def _pieces(self, node: fx.Node) -> list[fx.Node]:
        return [user for user in node.users if self._is_piece(user)]

    def _place(self, node: fx.Node, kind: Placement) -> None:
        found = self.placements[node]
        self.placements[node] = (kind,) * len(found) if isinstance(found, tuple) else kind

    def _kind(self, node: fx.Node, partial: bool, invariant: bool) -> Placement:
        if node.op == "placeholder":
            found = self.placements[node]
            assert not isinstance(found, tuple)
            return found
        if self.deferred[node] or (self.summable[node] and partial and not invariant):
            return Replicated()
        return Invariant()

    def _use(self, value: fx.Node, user: fx.Node) -> str:
        """What a user's contribution to the gradient is."""
        if user.op == "output":
            return "none" if self.deferred[value] else "invariant"
        if user in self.moves:
            return "invariant" if user.target is ops.as_partial else "none"
        if not self._needs_gradient(user):
            return "none"
        if not self._whole(user):
            return "partial"
        found = self.placements[user]
        return "partial" if (found[0] if isinstance(found, tuple) else found) == Replicated() else "invariant"

    def _insert(self, value: fx.Node, users: list[fx.Node], target: Any) -> None:
        if not users:
            return
        position = {node: index for index, node in enumerate(self.order)}
        with self.graph.inserting_before(min(users, key=position.__getitem__)):
            copy = self.graph.call_function(target, (value, self.axis))
        set_info(copy, replace(info(value), role=""))
        self.placements[copy] = Replicated() if target is ops.copy_in else Invariant()
        for user in users:
            user.replace_input_with(value, copy)

    def _choose_slice(self, node: fx.Node) -> None:
        """A local slice takes the kind of its source."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        if node.target is ops.shard and self.placements[source] == Replicated() and self._needs_gradient(source):
            node.target = ops.shard_r

"""Tensor parallelism: regions of each block split by features or heads, norms along the sequence, vocabulary in table and loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
from torch import fx

from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.ops.attention import attention
from hgc.ir.placement import Placement, Shard
from hgc.ir.program import STATE, Block, Program
from hgc.ir.rules.core import named_arguments, overloads
from hgc.ir.value import Value, info
from hgc.ir.verifier import planning_hints
from hgc.passes.base import Transform
from hgc.passes.sharding.layout import AxisLayout
from hgc.passes.sharding.lower import lower_axis
from hgc.passes.sharding.regions import find_head, find_regions, is_product, weight_of
from hgc.plan import Plan

_LOSSES = (*overloads("cross_entropy_loss"), ops.cross_entropy)
_LOOKUPS = overloads("embedding")


@dataclass(frozen=True)
class TensorParallel(Transform):
    """Split layers over ``tp`` in Megatron-LM's way (column then row parallel, https://arxiv.org/abs/1909.08053), found from the graph."""

    name: ClassVar[str] = "tensor-parallel"

    def applies(self, plan: Plan) -> bool:
        return plan.strategy.tp > 1

    def run(self, program: Program, plan: Plan) -> Program:
        strategy = plan.strategy
        hints = planning_hints(program, plan.devices)
        layout, notes = tensor_layout(program, "tp", strategy.tp, hints, strategy.sequence_parallel, strategy.vocab_parallel)
        lowered = lower_axis(program, layout, hints)
        lowered.report.extend(notes)
        return lowered


def tensor_layout(
    program: Program, axis: str, size: int, hints: dict[sympy.Symbol, int], sequence: bool = True, vocabulary: bool = True
) -> tuple[AxisLayout, list[str]]:
    """Placements of all state on a tensor axis, and what stays whole, in sentences.

    Raises :class:`~hgc.errors.ShardingError` if attention heads do not divide, or if nothing in the model can be split.
    """
    search = _Search(program, axis, size, hints)
    search.blocks()
    if vocabulary:
        search.vocabulary()
    if not search.state:
        raise ShardingError(
            f"tp is {size}, but no layer of {program.name} can be split {size} ways: no pair of products has a divisible width between; "
            "use tp=1 and more data parallelism"
        )
    return AxisLayout(axis, size, inputs={}, state=search.state, sequence_dim=1 if sequence else None), [*search.notes, *search.whole()]


class _Search:
    def __init__(self, program: Program, axis: str, size: int, hints: dict[sympy.Symbol, int]) -> None:
        self.program, self.axis, self.size, self.hints = program, axis, size, hints
        self.mesh = {**program.mesh, axis: size}
        self.state: dict[str, Placement] = {}
        self.notes: list[str] = []

    def blocks(self) -> None:
        """Regions of each body once; every block that calls it is split alike."""
        regions: dict[str, dict[fx.Node, Placement]] = {}
        for block in self.program.blocks():
            graph = self.program.body(block.body).graph
            if block.body not in regions:
                self._check_heads(block, graph)
                regions[block.body] = {}
                for region in find_regions(graph, self.axis, self.mesh, self.hints):
                    regions[block.body] |= region.parameters
            self._assign(block, regions[block.body])

    def _assign(self, block: Block, parameters: dict[fx.Node, Placement]) -> None:
        names = _state_names(self.program, block)
        for placeholder, placement in parameters.items():
            if placeholder in names:
                self.state.setdefault(names[placeholder], placement)

    def _check_heads(self, block: Block, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target is not attention:
                continue
            q, k = (_shape(node.args[i]) for i in (0, 1))
            heads, groups = int(q[1]), int(k[1])
            if heads % self.size or (groups % self.size and groups != 1):
                what = f"{heads} heads" if heads == groups else f"{heads} heads and {groups} key-value heads"
                possible = [n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or groups == 1)]
                raise ShardingError(
                    f"attention of {block.path or block.body} has {what}, which tp={self.size} does not divide; "
                    f"possible tp sizes: {', '.join(map(str, possible))}"
                )

    def whole(self) -> list[str]:
        """A sentence for each kind of block with products that no region could take."""
        sentences: dict[str, str] = {}
        for block in self.program.blocks():
            names = _state_names(self.program, block)
            weights = [weight_of(n) for n in self.program.body(block.body).graph.nodes if is_product(n)]
            left = [w for w in weights if w is not None and names.get(w) not in self.state]
            if left and block.body not in sentences:
                listed = ", ".join(dict.fromkeys(info(w).path for w in left))
                sentences[block.body] = (
                    f"{block.body} runs {listed} whole on every rank of {self.axis!r}: no split of size {self.size} fits there"
                )
        return list(sentences.values())

    def vocabulary(self) -> None:
        """Split the product in front of the loss by classes, and the tables that token ids look up by rows."""
        for block in self.program.blocks():
            graph = self.program.body(block.body).graph
            for node in graph.nodes:
                if node.target in _LOSSES:
                    self._head(block, node)
        for block in self.program.blocks():
            for node in self.program.body(block.body).graph.nodes:
                if node.target in _LOOKUPS:
                    self._table(block, node)

    def _head(self, block: Block, loss: fx.Node) -> None:
        region = find_head(loss, self.axis, self.mesh, self.hints)
        if region is not None:
            self._assign(block, region.parameters)

    def _table(self, block: Block, lookup: fx.Node) -> None:
        weight = named_arguments(lookup)["weight"]
        name = _state_names(self.program, block).get(weight)
        if name is None or name in self.state or not _reads_input(named_arguments(lookup)["indices"]):
            return
        rows = int(_shape(weight)[0])
        if rows % self.size == 0:
            self.state[name] = Shard(0)
        else:
            self.notes.append(f"table {name!r} has {rows} rows, which tp={self.size} does not divide: it stays whole on every rank")


def _state_names(program: Program, block: Block) -> dict[Any, str]:
    """Body placeholder -> name of the state that this block passes."""
    graph = program.body(block.body).graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    pairs = zip(placeholders, block.node.args, strict=True)
    return {p: str(a.target).removeprefix(STATE) for p, a in pairs if isinstance(a, fx.Node) and a.op == "get_attr"}


def _reads_input(indices: Any) -> bool:
    """Do the indices come from the user's data (token ids), not from counting positions?"""
    stack, seen = [indices], set()
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node in seen:
            continue
        seen.add(node)
        if node.op == "placeholder" and info(node).role == "input":
            return True
        stack.extend(n for n in node.all_input_nodes if info(n).size is None)
    return False


def _shape(node: Any) -> tuple[Any, ...]:
    value = info(node).value
    assert isinstance(value, Value)
    return value.shape

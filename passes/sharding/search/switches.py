"""What it takes to go on with another strategy on the same ranks: what crosses changes meshes, and its gradient changes them back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from torch import fx

from hgc.cluster import Cluster
from hgc.cost.exchange import Crossing, exchange_s, sent_bytes
from hgc.ir.program import RECEIVED, Program
from hgc.ir.value import info, value
from hgc.passes.sharding.data_parallel import batch_first
from hgc.passes.sharding.search.problem import Numbers
from hgc.runtime.executor_exchange import Side, side
from hgc.strategy import Strategy

Sides = tuple[Side, ...]
"""Of each value that crosses."""


def carried(block: Program) -> list[fx.Node]:
    """What a block gets from others and hands a gradient back for."""
    return [node for node in block.inputs() if info(node).role == RECEIVED and value(node).requires_grad]


def sides(block: Program, lowered: Program | None, strategy: Strategy) -> Sides:
    """Where a strategy has what is :func:`carried` into a block; what it lets a block leave is what it lets the next one receive.

    ``lowered``: the block under all axes of the strategy but ``dp``, which splits the batch; ``None`` if that cannot be: whole then.
    """
    known = {node.name: value(node).placements for node in carried(lowered)} if lowered is not None else {}
    found = []
    for node in carried(block):
        is_split = "dp" in strategy.mesh and batch_first(block, node, strategy.dp)
        placements = {"dp": "S(0)"} if is_split else {}
        found.append(side(0, strategy.mesh, placements | {axis: str(placement) for axis, placement in known.get(node.name, ())}))
    return tuple(found)


def exchanges_s(cluster: Cluster, held: Sequence[Sides], dims: Sequence[int], bytes_: Sequence[float]) -> Numbers:
    """``[strategies, strategies]``: seconds of the executor's exchange of one micro-batch, forward and backward.

    ``held``: of each strategy; ``dims`` and ``bytes_`` of each value that crosses, whole.
    """
    found = np.zeros((len(held), len(held)))
    alike: dict[Sides, list[int]] = {}
    for index, each in enumerate(held):
        alike.setdefault(each, []).append(index)
    for source, target in itertools.permutations(alike, 2):
        moved = [Crossing(*entry) for entry in zip(source, target, dims, bytes_, strict=True) if entry[0] != entry[1]]
        seconds = exchange_s(cluster, 0, 0, sent_bytes(moved))
        found[np.ix_(alike[source], alike[target])] += seconds
        found[np.ix_(alike[target], alike[source])] += seconds  # what a block receives is never R, so gradients travel as values do
    return found

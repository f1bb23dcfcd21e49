"""Stages of about equal work, for plans made by hand; planners weigh costs and links instead."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from hgc.errors import PlanError
from hgc.ir.program import Block, Program
from hgc.ir.value import value
from hgc.passes.sharding.regions import is_product, weight_of
from hgc.plan import Stage
from hgc.strategy import Strategy


def even_stages(program: Program, places: int, strategy: Strategy | None = None, virtual: int = 1, vee: bool = False) -> tuple[Stage, ...]:
    """``places * virtual`` stages on ``places`` groups of ranks, each of ``strategy.devices`` (default: one rank).

    A block weighs as much as its matrices that activations are multiplied with; the heaviest stage is as light as contiguous cuts
    allow. Virtual stages go around the places (``0 1 0 1``), with ``vee`` there and back (``0 1 1 0``, as ``zbv`` wants them).
    Raises :class:`~hgc.errors.PlanError` if there are fewer blocks than stages.
    """
    strategy = strategy or Strategy()
    weights = [_weight(program, block) for block in program.blocks()]
    count = places * virtual
    if count > len(weights):
        raise PlanError(f"{count} stages need {count} blocks or more, but {program.name} has {len(weights)}; use pp{len(weights)} at most")
    return tuple(
        Stage(blocks, _place(index, places, vee) * strategy.devices, strategy) for index, blocks in enumerate(_partition(weights, count))
    )


def _place(stage: int, places: int, vee: bool) -> int:
    lap, position = divmod(stage, places)
    return places - 1 - position if vee and lap % 2 else position


def _weight(program: Program, block: Block) -> float:
    """Elements of the matrices, and a little for any block, so that blocks without matrices are shared out too."""
    products = [weight_of(node) for node in program.body(block.body).graph.nodes if is_product(node)]
    return 1.0 + sum(math.prod(int(size) for size in value(weight).shape) for weight in products if isinstance(weight, fx.Node))


def _partition(weights: Sequence[float], count: int) -> list[int]:
    """How many items each of ``count`` contiguous parts takes so that the heaviest is lightest; earlier parts are the longer ones."""
    total = [0.0]
    for weight in weights:
        total.append(total[-1] + weight)
    items = len(weights)
    best = [[math.inf] * (items + 1) for _ in range(count + 1)]
    taken = [[0] * (items + 1) for _ in range(count + 1)]
    best[0][items] = 0.0  # best[p][i]: the heaviest of p parts that share the items from i on
    for parts in range(1, count + 1):
        for start in range(items - parts, -1, -1):
            for end in range(items - parts + 1, start, -1):
                heaviest = max(total[end] - total[start], best[parts - 1][end])
                if heaviest < best[parts][start]:
                    best[parts][start], taken[parts][start] = heaviest, end - start
    counts, start = [], 0
    for parts in range(count, 0, -1):
        counts.append(taken[parts][start])
        start += counts[-1]
    return counts

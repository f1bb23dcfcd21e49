"""Collectives: what they do to placements on their own axis, and what they let through on the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from hgc.ir import ops
from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard, zigzag
from hgc.ir.rules.core import PARTIAL, Call, Case, rule
from hgc.ir.value import info

COLLECTIVES: tuple[Any, ...] = (
    ops.copy_in,
    ops.as_invariant,
    ops.as_partial,
    ops.all_reduce,
    ops.all_reduce_r,
    ops.all_gather,
    ops.all_gather_i,
    ops.reduce_scatter,
    ops.shard,
    ops.shard_r,
    ops.all_to_all,
)
_WITHOUT_DIM = (ops.copy_in, ops.as_invariant, ops.as_partial, ops.all_reduce, ops.all_reduce_r)


def transition(target: Any, arguments: Any) -> tuple[Placement, Placement]:
    """The placement a collective takes on its own axis, and the one it gives."""
    if target is ops.all_to_all:
        return Shard(arguments["src"]), Shard(arguments["dst"])
    fixed: dict[Any, tuple[Placement, Placement]] = {
        ops.copy_in: (Invariant(), Replicated()),
        ops.as_invariant: (Replicated(), Invariant()),
        ops.as_partial: (Invariant(), Partial()),
        ops.all_reduce: (Partial(), Invariant()),
        ops.all_reduce_r: (Partial(), Replicated()),
    }
    if target in fixed:
        return fixed[target]
    shard = Shard(arguments["dim"], _parts(arguments.get("parts", 1), arguments.get("zigzag", False)))
    along: dict[Any, tuple[Placement, Placement]] = {
        ops.all_gather: (shard, Replicated()),
        ops.all_gather_i: (shard, Invariant()),
        ops.reduce_scatter: (Partial(), shard),
        ops.shard: (Invariant(), shard),
        ops.shard_r: (Replicated(), shard),
    }
    return along[target]


def _parts(parts: Any, in_zigzag: bool) -> Any:
    """A symbolic count is a size node in the graph, or what stands for it in a call."""
    count = info(parts).size if isinstance(parts, fx.Node) else tuple(parts) if isinstance(parts, list | tuple) else parts
    return zigzag(count) if in_zigzag else count


def _comes_first(call: Call, dim: int) -> bool:
    """Does this axis split the dim before the collective's does? Its parts then are those of a rank."""
    parts = call.arguments.get("parts", 1)
    fits = not isinstance(parts, list | tuple) or sum(parts) * call.size == call.operands[0].shape[dim]
    return call.is_before(call["axis"]) and fits


@rule(*COLLECTIVES)
def passing(call: Call) -> Iterator[Case]:
    """On another axis a collective is an ordinary linear operator. A dim that it moves may be sharded by an axis before its own only."""
    yield call.all_whole()
    yield call.case({0: PARTIAL}, PARTIAL)
    (operand,) = call.operands
    moved = () if call.target in _WITHOUT_DIM else (call["src"], call["dst"]) if call.target is ops.all_to_all else (call["dim"],)
    for dim in range(operand.rank):
        if (dim not in moved or _comes_first(call, dim)) and call.divides(operand.shape[dim]):
            yield call.case({0: Shard(dim)}, Shard(dim))
    found = operand.found
    if isinstance(found, Shard) and not found.is_plain and (found.dim not in moved or _comes_first(call, found.dim)):
        yield call.case({0: found}, found)

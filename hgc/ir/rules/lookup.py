"""Embeddings and cross entropy."""

from __future__ import annotations

from collections.abc import Iterator

from hgc.ir import ops
from hgc.ir.placement import Shard
from hgc.ir.rules.core import PARTIAL, WHOLE, Call, Case, Operand, overloads, rule
from hgc.ir.rules.rewrites import cross_entropy_classes, cross_entropy_rows, to_vocab_embedding


def _lookup(call: Call, weight: Operand, ids: Operand) -> Iterator[Case]:
    yield call.all_whole()
    if call.divides(weight.shape[1]):
        yield call.case({weight.index: Shard(1)}, Shard(ids.rank))
    if call.arguments.get("scale_grad_by_freq"):  # every rank would count its own ids
        return
    for dim in range(ids.rank):
        if call.divides(ids.shape[dim]):
            yield call.case({ids.index: Shard(dim)}, Shard(dim))
    if isinstance(ids.found, Shard) and not ids.found.is_plain:
        yield call.case({ids.index: ids.found}, ids.found)


@rule(*overloads("embedding"))
def embedding(call: Call) -> Iterator[Case]:
    weight, ids = call["weight"], call["indices"]
    yield from _lookup(call, weight, ids)
    if call.divides(weight.shape[0]) and not call["scale_grad_by_freq"]:
        yield call.case({weight.index: Shard(0)}, PARTIAL, rewrite=to_vocab_embedding)


@rule(ops.vocab_embedding)
def vocab_embedding(call: Call) -> Iterator[Case]:
    weight, ids = call["weight"], call["ids"]
    if call.axis == call["axis"]:
        yield call.case({weight.index: Shard(0)}, PARTIAL)
    else:
        yield from _lookup(call, weight, ids)


@rule(*overloads("cross_entropy_loss"), ops.cross_entropy)
def cross_entropy(call: Call) -> Iterator[Case]:
    own = call.target is ops.cross_entropy
    logits, target = call["logits" if own else "self"], call["target"]
    rows = own and call.axis in call["batch_axes"]
    classes = own and call.axis == call["vocab_axis"]
    indices = target.dtype.is_floating_point is False and logits.rank == 2
    if not rows and not classes:
        yield call.all_whole()
    if not classes and logits.rank > 1:
        yield from _rows(call, logits, target, lowered=rows)
    if not indices:
        return
    if not rows and (classes or not own or call["vocab_axis"] is None) and call.divides(logits.shape[1]):
        yield call.case({logits.index: Shard(1)}, WHOLE, rewrite=None if classes else cross_entropy_classes)


def _rows(call: Call, logits: Operand, target: Operand, lowered: bool) -> Iterator[Case]:
    unreduced = call["reduction"] in (0, "none")
    placements = [Shard(0)] if call.divides(logits.shape[0]) else []
    placements += [o.found for o in (logits, target) if isinstance(o.found, Shard) and o.found.dim == 0 and not o.found.is_plain]
    for placement in placements:
        placed = {logits.index: placement, target.index: placement}
        if unreduced:
            yield call.case(placed, placement)
        else:
            yield call.case(placed, PARTIAL, rewrite=None if lowered else cross_entropy_rows)

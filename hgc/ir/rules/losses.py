"""Losses of one value for each element or row."""

from __future__ import annotations

from collections.abc import Iterator

from hgc.ir.placement import Shard
from hgc.ir.rules.core import PARTIAL, Call, Case, overloads, rule
from hgc.ir.rules.pointwise import sharded, strided

_MEAN = 1
_ELEMENTWISE = overloads(
    "mse_loss",
    "l1_loss",
    "smooth_l1_loss",
    "huber_loss",
    "soft_margin_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "kl_div",
)


@rule(*_ELEMENTWISE)
def elementwise_loss(call: Call) -> Iterator[Case]:
    """Without a reduction pointwise; a sum is the partial sum of every rank; a mean stays whole."""
    yield call.all_whole()
    if call["reduction"] == _MEAN:
        return
    if call["reduction"] == 0:
        yield from sharded(call)
        yield from strided(call)
        return
    first = call.operands[0]
    if all(operand.shape == first.shape for operand in call.operands):
        for dim in range(first.rank):
            if call.divides(first.shape[dim]):
                yield call.case({o.index: Shard(dim) for o in call.operands}, PARTIAL)


@rule(*overloads("nll_loss", "nll_loss_nd", "nll_loss2d"))
def nll_loss(call: Call) -> Iterator[Case]:
    """Rows are independent; their mean divides by a count of all ranks, so it stays whole."""
    x, target = call["self"], call["target"]
    yield call.all_whole()
    if call["reduction"] != _MEAN and x.rank > 1 and call.divides(x.shape[0]):
        yield call.case({x.index: Shard(0), target.index: Shard(0)}, PARTIAL if call["reduction"] else Shard(0))

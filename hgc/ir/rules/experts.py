"""Mixture of experts: tokens may be sharded all the way from dispatch to combine, experts' matrices by features."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from hgc.ir.ops.moe import grouped_linear as grouped_linear_op
from hgc.ir.ops.moe import moe_combine as moe_combine_op
from hgc.ir.ops.moe import moe_dispatch as moe_dispatch_op
from hgc.ir.placement import Shard
from hgc.ir.rules import collectives, indexing, pointwise, shape
from hgc.ir.rules.by_expert import is_by_expert, order_of, rows_of, tokens_of
from hgc.ir.rules.core import PARTIAL, WHOLE, Call, Case, Operand, rule, rule_for

_KEEP_ROWS_APART = (pointwise.pointwise, pointwise.dropout, shape.split, shape.along_dims, indexing.index, collectives.passing)


def _tokens(call: Call, *operands: Operand) -> Iterator[Shard]:
    """Ways to shard the tokens of a call: plainly, or strided as they are found."""
    if call.divides(operands[0].shape[0]):
        yield Shard(0)
    for operand in operands:
        found = operand.found
        if isinstance(found, Shard) and found.dim == 0 and not found.is_plain and not is_by_expert(found):
            yield found


@rule(moe_dispatch_op)
def moe_dispatch(call: Call) -> Iterator[Case]:
    """Every rank sorts its own tokens; its offsets are a summand of the global ones."""
    x, experts = call["x"], call["experts"]
    yield call.all_whole()
    if call.divides(x.shape[1]):
        yield call.case({x.index: Shard(1)}, Shard(1), WHOLE, WHOLE)
    if _ends_in_combine(x.node, experts.node):
        for tokens in _tokens(call, x, experts):
            yield call.case({x.index: tokens, experts.index: tokens}, rows_of(tokens), PARTIAL, order_of(tokens))


@rule(grouped_linear_op)
def grouped_linear(call: Call) -> Iterator[Case]:
    """Output features, input features, or rows."""
    rows, weight, offsets = call["rows"], call["weight"], call["offsets"]
    inner, outer = (1, 2) if call["transposed"] else (2, 1)
    yield call.all_whole()
    if call.divides(weight.shape[outer]):
        yield call.case({weight.index: Shard(outer)}, Shard(1))
    if isinstance(weight.found, Shard) and weight.found.dim == outer and not weight.found.is_plain:
        yield call.case({weight.index: weight.found}, Shard(1, weight.found.parts))
    if call.divides(weight.shape[inner]):
        yield call.case({rows.index: Shard(1), weight.index: Shard(inner)}, PARTIAL)
    yield call.case({rows.index: PARTIAL}, PARTIAL)
    if is_by_expert(rows.found):
        yield call.case({rows.index: rows.found, offsets.index: PARTIAL}, rows.found)


@rule(moe_combine_op)
def moe_combine(call: Call) -> Iterator[Case]:
    """Features, or tokens: rows, order and weights of the same ones."""
    rows, order, weights = call["rows"], call["order"], call["weights"]
    yield call.all_whole()
    yield call.case({rows.index: PARTIAL}, PARTIAL)
    if call.divides(rows.shape[1]):
        yield call.case({rows.index: Shard(1)}, Shard(1))
    if is_by_expert(rows.found):
        tokens = tokens_of(rows.found)
        yield call.case({rows.index: rows.found, order.index: order_of(tokens), weights.index: tokens}, tokens)


def _ends_in_combine(x: fx.Node, experts: fx.Node) -> bool:
    """Does everything made of the rows keep them apart until they are combined? Else nothing could be done with sharded ones."""
    own = [n for n in experts.users if n.target is moe_dispatch_op and x in n.all_input_nodes]
    others = [n for n in experts.graph.nodes if n.target is moe_dispatch_op and n not in own]
    made, combined = _made_of_rows(own)
    return combined and not any(made & _made_of_rows([other])[0] for other in others)  # rows of two dispatches are in different orders


def _made_of_rows(dispatches: list[fx.Node]) -> tuple[set[fx.Node], bool]:
    """Everything made of rows or order up to the combine; True if each path ends in one."""
    stack = [piece for dispatch in dispatches for piece in dispatch.users if piece.args[1] != 1]
    ends = bool(stack)
    for node in stack:
        if node.target is moe_combine_op:
            continue
        if node.target in (operator.getitem, grouped_linear_op) or rule_for(node.target) in _KEEP_ROWS_APART:
            stack.extend(user for user in node.users if user not in stack)
        else:
            ends = False
    return set(stack), ends and any(node.target is moe_combine_op for node in stack)

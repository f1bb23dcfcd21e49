"""Operators that address elements by integers: index, gather, scatter, one-hot codes."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from hgc.ir.placement import Placement, Shard
from hgc.ir.rules.by_expert import is_order, rows_of, tokens_of
from hgc.ir.rules.core import PARTIAL, Call, Case, Operand, overloads, rule, strided_inputs


@rule(*overloads("index_select"))
def index_select(call: Call) -> Iterator[Case]:
    """Dims that the index does not address, or the index itself."""
    x, index = call["self"], call["index"]
    dim = call["dim"] % max(x.rank, 1)
    yield call.all_whole()
    yield call.case({x.index: PARTIAL}, PARTIAL)
    for own in range(x.rank):
        if own != dim and call.divides(x.shape[own]):
            yield call.case({x.index: Shard(own)}, Shard(own))
    if index.rank == 1 and call.divides(index.shape[0]):
        yield call.case({index.index: Shard(0)}, Shard(dim))
    for operand, found in strided_inputs(call):
        if operand is x and found.dim != dim:
            yield call.case({x.index: found}, found)
        elif operand is index and index.rank == 1 and not is_order(found):
            yield call.case({index.index: found}, Shard(dim, found.parts))


@rule(*overloads("gather"))
def gather(call: Call) -> Iterator[Case]:
    """Every output element reads the row of its own index; along the addressed dim the index may be sharded alone."""
    x, index = call["self"], call["index"]
    dim = call["dim"] % max(x.rank, 1)
    yield call.all_whole()
    yield call.case({x.index: PARTIAL}, PARTIAL)
    for own in range(x.rank):
        if not call.divides(index.shape[own]):
            continue
        if own == dim:
            yield call.case({index.index: Shard(own)}, Shard(own))
        elif index.shape[own] == x.shape[own]:
            yield call.case({x.index: Shard(own), index.index: Shard(own)}, Shard(own))
    for operand, found in strided_inputs(call):
        if found.dim == dim:
            if operand is index and not is_order(found):
                yield call.case({index.index: found}, found)
        elif index.shape[found.dim] == x.shape[found.dim]:
            yield call.case({x.index: found, index.index: found}, found)


@rule(*overloads("scatter.src", "scatter.value", "scatter_add", "scatter.reduce", "scatter_reduce.two"))
def scatter(call: Call) -> Iterator[Case]:
    """Dims that the index does not address and that all operands have in full."""
    x = call["self"]
    dim = call["dim"] % max(x.rank, 1)
    yield call.all_whole()
    for own in range(x.rank):
        if own != dim and call.divides(x.shape[own]) and all(o.shape[own] == x.shape[own] for o in call.operands):
            yield call.case({o.index: Shard(own) for o in call.operands}, Shard(own))
    for _, found in strided_inputs(call):
        if found.dim != dim and all(o.shape[found.dim] == x.shape[found.dim] for o in call.operands):
            yield call.case({o.index: found for o in call.operands}, found)


@rule(*overloads("index_add", "index_copy", "index_fill.int_Scalar"))
def index_add(call: Call) -> Iterator[Case]:
    x, index = call["self"], call["index"]
    dim = call["dim"] % max(x.rank, 1)
    yield call.all_whole()
    for own in range(x.rank):
        if own != dim and call.divides(x.shape[own]):
            yield call.case({o.index: Shard(own) for o in call.operands if o is not index}, Shard(own))


@rule(*overloads("index.Tensor"))
def index(call: Call) -> Iterator[Case]:
    """``x[..., i, j]``: dims that no index addresses, or the dims of the indices, whose broadcast shape takes their place."""
    x, indices = call["self"], call["indices"]
    yield call.all_whole()
    if any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return  # masks: how many elements a rank finds depends on the data
    yield call.case({x.index: PARTIAL}, PARTIAL)
    yield from _strided_index(call, x, indices)
    addressed = [dim for dim, i in enumerate(indices) if i is not None]
    taken: list[Operand] = [indices[dim] for dim in addressed]
    shape = len(call.shape) - (x.rank - len(addressed))
    first = addressed[0] if addressed == list(range(addressed[0], addressed[-1] + 1)) else 0
    for own in range(x.rank):
        if own not in addressed and call.divides(x.shape[own]):
            before = own - sum(dim < own for dim in addressed)
            yield call.case({x.index: Shard(own)}, Shard(before + shape * (before >= first)))
    for dim in range(shape):
        placed: dict[int, Placement] = {}
        for operand in taken:
            own = dim - (shape - operand.rank)
            if own >= 0 and operand.shape[own] == call.shape[first + dim]:
                placed[operand.index] = Shard(own)
        if placed and call.divides(call.shape[first + dim]):
            yield call.case(placed, Shard(first + dim))


def _strided_index(call: Call, x: Operand, indices: list[Operand | None]) -> Iterator[Case]:
    """A single strided index gives strided rows; one that counts a rank's own tokens reads what is sharded as they are."""
    taken = [(dim, i) for dim, i in enumerate(indices) if i is not None]
    if len(taken) != 1:
        return
    ((dim, operand),) = taken
    found = operand.found
    if not isinstance(found, Shard) or found.is_plain:
        return
    if not is_order(found):
        yield call.case({operand.index: found}, Shard(dim + found.dim, found.parts))
        return
    if dim == 0 and operand.rank == 1:
        tokens = tokens_of(found)
        yield call.case({x.index: tokens, operand.index: found}, rows_of(tokens))


@rule(*overloads("one_hot", "bucketize.Tensor"))
def elementwise(call: Call) -> Iterator[Case]:
    """Every element of the first operand on its own; a new dim may follow at the end."""
    x = call["self"]
    yield call.all_whole()
    for dim in range(x.rank):
        if call.divides(x.shape[dim]):
            yield call.case({x.index: Shard(dim)}, Shard(dim))
    for operand, found in strided_inputs(call):
        if operand is x:
            yield call.case({x.index: found}, found)


@rule(*overloads("arange", "arange.start", "arange.start_step", "rand", "randn", "randint", "randint.low", "linspace", "eye"))
def generated(call: Call) -> Iterator[Case]:
    """Made alike on every rank; a rank that needs a slice takes it."""
    yield call.all_whole()

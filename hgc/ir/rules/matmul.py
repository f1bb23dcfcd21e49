"""Matrix products, convolutions and operators on images."""

from __future__ import annotations

from collections.abc import Iterator

from hgc.ir.placement import Placement, Shard
from hgc.ir.rules.core import PARTIAL, Call, Case, Operand, overloads, rule, strided_inputs


@rule(*overloads("linear"))
def linear(call: Call) -> Iterator[Case]:
    """``y = x W^T + b``: rows of ``W`` give column parallel output, columns of ``W`` a partial sum, to which the bias is a summand."""
    x, w, bias = call["input"], call["weight"], call["bias"]
    last = x.rank - 1
    yield call.all_whole()
    for dim in range(last):
        if call.divides(x.shape[dim]):
            yield call.case({x.index: Shard(dim)}, Shard(dim))
    if call.divides(w.shape[0]):
        yield call.case({w.index: Shard(0)} | ({bias.index: Shard(0)} if bias else {}), Shard(last))
    if isinstance(w.found, Shard) and w.found.dim == 0 and not w.found.is_plain:
        parts = w.found.parts
        yield call.case({w.index: w.found} | ({bias.index: Shard(0, parts)} if bias else {}), Shard(last, parts))
    summed: dict[int, Placement] = {bias.index: PARTIAL} if bias else {}
    if call.divides(w.shape[1]):
        yield call.case({x.index: Shard(last), w.index: Shard(1)} | summed, PARTIAL)
    yield call.case({x.index: PARTIAL} | summed, PARTIAL)
    for operand, found in strided_inputs(call):
        if operand.index == x.index and found.dim < last:
            yield call.case({x.index: found}, found)


@rule(*overloads("matmul", "bmm", "mm"))
def matmul(call: Call) -> Iterator[Case]:
    """Batch dims, rows of the first, columns of the second, or the dim between; a vector has no row or no column."""
    a, b = call.operands
    rank, inner = len(call.shape), max(b.rank - 2, 0)
    row = rank - min(b.rank, 2) if a.rank > 1 else None
    column = rank - 1 if b.rank > 1 else None
    yield call.all_whole()
    if not a.rank or not b.rank:
        return
    batch = rank - (row is not None) - (column is not None)
    for dim in range(batch):
        placed: dict[int, Placement] = {}
        for operand in (a, b):
            own = dim - (batch - (operand.rank - 2))
            if 0 <= own < operand.rank - 2 and operand.shape[own] == call.shape[dim]:
                placed[operand.index] = Shard(own)
        if placed and call.divides(call.shape[dim]):
            yield call.case(placed, Shard(dim))
    yield from _strided_product(call, a, b, batch, row, column)
    if row is not None and call.divides(a.shape[-2]):
        yield call.case({a.index: Shard(a.rank - 2)}, Shard(row))
    if column is not None and call.divides(b.shape[-1]):
        yield call.case({b.index: Shard(b.rank - 1)}, Shard(column))
    if call.divides(a.shape[-1]):
        yield call.case({a.index: Shard(a.rank - 1), b.index: Shard(inner)}, PARTIAL)
    yield call.case({a.index: PARTIAL}, PARTIAL)
    yield call.case({b.index: PARTIAL}, PARTIAL)


def _strided_product(call: Call, a: Operand, b: Operand, batch: int, row: int | None, column: int | None) -> Iterator[Case]:
    """Strided shards of batch dims, rows and columns stay as they are."""
    for operand, found in strided_inputs(call):
        if operand is a and row is not None and found.dim == a.rank - 2:
            yield call.case({a.index: found}, Shard(row, found.parts))
        elif operand is b and column is not None and found.dim == b.rank - 1:
            yield call.case({b.index: found}, Shard(column, found.parts))
        elif found.dim < operand.rank - 2:
            dim = found.dim + batch - (operand.rank - 2)
            placed: dict[int, Placement] = {}
            for each in (a, b):
                own = dim - (batch - (each.rank - 2))
                if 0 <= own < each.rank - 2 and each.shape[own] == call.shape[dim]:
                    placed[each.index] = Shard(own, found.parts)
            yield call.case(placed, Shard(dim, found.parts))


@rule(*overloads("einsum"))
def einsum(call: Call) -> Iterator[Case]:
    """A letter of the result is sharded in every operand that has it; a letter that is summed gives partial sums."""
    yield call.all_whole()
    inputs, arrow, result = call["equation"].replace(" ", "").partition("->")
    terms = inputs.split(",")
    if not arrow or "." in inputs or any(len(set(term)) != len(term) for term in terms):
        return
    for letter in dict.fromkeys("".join(terms)):
        held = [(o, term.index(letter)) for o, term in zip(call.operands, terms, strict=True) if letter in term]
        if all(call.divides(o.shape[dim]) for o, dim in held):
            yield call.case({o.index: Shard(dim) for o, dim in held}, Shard(result.index(letter)) if letter in result else PARTIAL)
    for operand in call.operands:
        yield call.case({operand.index: PARTIAL}, PARTIAL)


@rule(*overloads("conv1d", "conv2d", "conv3d", "conv1d.padding", "conv2d.padding", "conv3d.padding"))
def convolution(call: Call) -> Iterator[Case]:
    x, w, bias = call["input"], call["weight"], call["bias"]
    yield call.all_whole()
    if x.rank != w.rank:
        return
    if call.divides(x.shape[0]):
        yield call.case({x.index: Shard(0)}, Shard(0))
    if call["groups"] != 1:
        return
    if call.divides(w.shape[0]):
        yield call.case({w.index: Shard(0)} | ({bias.index: Shard(0)} if bias else {}), Shard(1))
    if call.divides(w.shape[1]):
        summed: dict[int, Placement] = {bias.index: PARTIAL} if bias else {}
        yield call.case({x.index: Shard(1), w.index: Shard(1)} | summed, PARTIAL)


_TRANSPOSED = overloads("conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input")
_RESAMPLED = overloads(
    "upsample_nearest2d.vec", "upsample_bilinear2d.vec", "upsample_bicubic2d.vec", "pixel_shuffle", "im2col", "grid_sampler"
)


@rule(*_TRANSPOSED, *_RESAMPLED)
def batch_only(call: Call) -> Iterator[Case]:
    """Images of a batch are independent."""
    x = call.operands[0]
    batch = call.operands[:1] if call.target in _TRANSPOSED else call.operands
    yield call.all_whole()
    if x.rank == len(call.shape) and x.rank > 2 + (call.target in _RESAMPLED) and call.divides(x.shape[0]) and _batched(call):
        yield call.case({o.index: Shard(0) for o in batch}, Shard(0))


def _batched(call: Call) -> bool:
    """An unbatched image has its channels first."""
    x = call.operands[0]
    return x.rank == call["weight"].rank if call.target in _TRANSPOSED else x.rank == 4


_POOLS = overloads("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")


@rule(*_POOLS)
def pooling(call: Call) -> Iterator[Case]:
    """Batch and channels; a pooled image has as many leading dims as its kernel leaves alone."""
    (x,) = call.operands
    spatial = 1 if call.target._schema.name.endswith("1d") else 2
    yield call.all_whole()
    for dim in range(x.rank - spatial):
        if call.divides(x.shape[dim]):
            yield call.case({x.index: Shard(dim)}, Shard(dim))

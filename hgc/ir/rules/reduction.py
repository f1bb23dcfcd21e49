"""Reductions and normalisations."""

from __future__ import annotations

from collections.abc import Iterator

from hgc.ir import ops
from hgc.ir.ops.reductions import mean as sharded_mean
from hgc.ir.placement import Shard
from hgc.ir.rules.core import PARTIAL, Call, Case, Rewrite, append_axis, overloads, rule, strided_inputs
from hgc.ir.rules.rewrites import to_batch_norm, to_mean


def _reduced(call: Call) -> tuple[set[int], bool]:
    """Dims that disappear (or become one), and whether they are kept."""
    rank = call.operands[0].rank
    dims = call.arguments.get("dim", call.arguments.get("dims"))
    if dims is None or dims == []:
        dims = range(rank)
    dims = [dims] if isinstance(dims, int) else dims
    return {dim % rank for dim in dims} if rank else set(), bool(call.arguments.get("keepdim"))


def _kept(call: Call) -> Iterator[Case]:
    """Dims that the reduction leaves alone."""
    gone, keep = _reduced(call)
    operand = call.operands[0]
    kept = {dim: dim if keep else dim - sum(g < dim for g in gone) for dim in range(operand.rank) if dim not in gone}
    for dim, new in kept.items():
        if call.divides(operand.shape[dim]):
            yield call.case({0: Shard(dim)}, Shard(new))
    for _, found in strided_inputs(call):
        if found.dim in kept:
            yield call.case({0: found}, Shard(kept[found.dim], found.parts))


@rule(*overloads("sum", "sum.dim_IntList"))
def total(call: Call) -> Iterator[Case]:
    """The sum over a sharded dim is the partial sum of every rank; the order of elements does not matter."""
    gone, _ = _reduced(call)
    yield call.all_whole()
    yield from _kept(call)
    yield call.case({0: PARTIAL}, PARTIAL)
    yield from _over_sharded(call, gone, None)


def _over_sharded(call: Call, gone: set[int], rewrite: Rewrite | None) -> Iterator[Case]:
    operand = call.operands[0]
    for dim in gone:
        if call.divides(operand.shape[dim]):
            yield call.case({0: Shard(dim)}, PARTIAL, rewrite=rewrite)
    if isinstance(operand.found, Shard) and not operand.found.is_plain and operand.found.dim in gone:
        yield call.case({0: operand.found}, PARTIAL, rewrite=rewrite)


@rule(*overloads("mean", "mean.dim"))
def mean(call: Call) -> Iterator[Case]:
    gone, _ = _reduced(call)
    yield call.all_whole()
    yield from _kept(call)
    yield call.case({0: PARTIAL}, PARTIAL)
    yield from _over_sharded(call, gone, to_mean)


@rule(sharded_mean)
def mean_over_axes(call: Call) -> Iterator[Case]:
    gone, _ = _reduced(call)
    if call.axis in call["batch_axes"]:
        yield from _over_sharded(call, gone, None)
        return
    yield call.all_whole()
    yield from _kept(call)
    yield call.case({0: PARTIAL}, PARTIAL)
    yield from _over_sharded(call, gone, append_axis("batch_axes"))


_EXTREMA = overloads("amax", "amin", "max.dim", "min.dim", "argmax", "argmin", "all.dim", "any.dim")
_MOMENTS = overloads("var.dim", "var.correction", "std.dim", "std.correction", "var_mean.correction")
_NORMS = overloads("logsumexp", "prod.dim_int", "linalg_vector_norm", "norm.ScalarOpt_dim")


@rule(*_EXTREMA, *_MOMENTS, *_NORMS)
def nonlinear(call: Call) -> Iterator[Case]:
    yield call.all_whole()
    yield from _kept(call)


_SOFTMAX = overloads("softmax.int", "log_softmax.int", "_softmax", "_log_softmax")
_ORDERS = overloads("sort", "sort.stable", "argsort", "argsort.stable", "topk")
_SCANS = overloads("cumprod", "logcumsumexp", "cummax", "cummin")


@rule(*_SOFTMAX, *_ORDERS, *_SCANS, *overloads("glu"))
def within_dim(call: Call) -> Iterator[Case]:
    (operand,) = call.operands
    yield call.all_whole()
    if not operand.rank:
        return
    own = call["dim"] % operand.rank
    for dim in range(operand.rank):
        if dim != own and call.divides(operand.shape[dim]):
            yield call.case({0: Shard(dim)}, Shard(dim))
    for _, found in strided_inputs(call):
        if found.dim != own:
            yield call.case({0: found}, found)


@rule(*overloads("layer_norm", "rms_norm"))
def normalise_trailing(call: Call) -> Iterator[Case]:
    x = call["input"]
    yield call.all_whole()
    for dim in range(x.rank - len(call["normalized_shape"])):
        if call.divides(x.shape[dim]):
            yield call.case({x.index: Shard(dim)}, Shard(dim))
    if isinstance(x.found, Shard) and not x.found.is_plain and x.found.dim < x.rank - len(call["normalized_shape"]):
        yield call.case({x.index: x.found}, x.found)


@rule(*overloads("group_norm"))
def group_norm(call: Call) -> Iterator[Case]:
    x = call["input"]
    yield call.all_whole()
    if call.divides(x.shape[0]):
        yield call.case({x.index: Shard(0)}, Shard(0))


@rule(*overloads("batch_norm"), ops.batch_norm)
def batch_norm(call: Call) -> Iterator[Case]:
    """Channels are independent; statistics over a sharded batch need the synchronised operator."""
    x = call.operands[0]
    own = call.target is ops.batch_norm
    synchronised = own and call.axis in call["batch_axes"]
    if not synchronised:
        yield call.all_whole()
        if call.divides(x.shape[1]):
            yield call.case({o.index: Shard(1 if o is x else 0) for o in call.operands}, Shard(1))
    if call.divides(x.shape[0]):
        from_batch = call["training"] or call["mean" if own else "running_mean"] is None
        rewrite = None if synchronised or not from_batch else append_axis("batch_axes") if own else to_batch_norm
        yield call.case({x.index: Shard(0)}, Shard(0), rewrite=rewrite)

"""Operators that move elements: reshape, transpose, slice, concatenate, split."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import sympy

from hgc.ir.placement import Placement, Shard, zigzag, zigzag_runs
from hgc.ir.rules.by_expert import is_by_expert
from hgc.ir.rules.core import PARTIAL, TO_THE_END, WHOLE, Call, Case, Operand, overloads, rule, strided_inputs
from hgc.ir.value import Size


def only(call: Call) -> Operand:
    """The operand of an operator with one tensor argument."""
    (operand,) = call.operands
    return operand


def mapped(call: Call, dims: dict[int, int]) -> Iterator[Case]:
    """Whole, partial, and each input dim sharded that ``dims`` maps to an output dim; strided shards follow the same map."""
    operand = only(call)
    yield call.all_whole()
    yield call.case({0: PARTIAL}, PARTIAL)
    for source, target in dims.items():
        if call.divides(operand.shape[source]):
            yield call.case({0: Shard(source)}, Shard(target))
    for _, found in strided_inputs(call):
        if found.dim in dims:
            yield call.case({0: found}, Shard(dims[found.dim], found.parts))


_TRANSPOSES = overloads("transpose.int", "permute", "t", "numpy_T", "mT", "movedim.int")


@rule(*_TRANSPOSES, *overloads("unsqueeze", "squeeze.dim", "squeeze.dims", "alias", "view_as_real", "view_as_complex"))
def rearrange(call: Call) -> Iterator[Case]:
    yield from mapped(call, _rearranged(call))


def _rearranged(call: Call) -> dict[int, int]:
    rank = only(call).rank
    name = call.target._schema.name.removeprefix("aten::")
    if name == "numpy_T":
        return {dim: rank - 1 - dim for dim in range(rank)}
    if name == "mT":
        return {dim: {rank - 1: rank - 2, rank - 2: rank - 1}.get(dim, dim) for dim in range(rank)}
    if name in ("view_as_real", "view_as_complex"):
        return {dim: dim for dim in range(rank - (name == "view_as_complex"))}
    if name == "permute":
        return {source % rank: target for target, source in enumerate(call["dims"])}
    if name == "alias":
        return {dim: dim for dim in range(rank)}
    if name in ("transpose", "t"):
        first, second = (0, 1) if name == "t" else (call["dim0"] % rank, call["dim1"] % rank)
        return {dim: {first: second, second: first}.get(dim, dim) for dim in range(rank)} if rank > 1 else dict.fromkeys(range(rank), 0)
    if name == "movedim":
        kept = [dim for dim in range(rank) if dim != call["source"] % rank]
        kept.insert(call["destination"] % rank, call["source"] % rank)
        return {source: target for target, source in enumerate(kept)}
    if name == "unsqueeze":
        new = call["dim"] % (rank + 1)
        return {dim: dim + (dim >= new) for dim in range(rank)}
    named = {dim % rank for dim in (call["dim"] if isinstance(call["dim"], list) else [call["dim"]])} if rank else set()
    gone = {dim for dim in named if only(call).shape[dim] == 1}
    return {dim: dim - sum(g < dim for g in gone) for dim in range(rank) if dim not in named}  # a named dim may have local size 1


@rule(*overloads("expand", "broadcast_to"))
def expand(call: Call) -> Iterator[Case]:
    operand = only(call)
    shift = len(call.shape) - operand.rank
    same = {d: d + shift for d in range(operand.rank) if operand.shape[d] == call.shape[d + shift]}
    yield from mapped(call, same)
    yield from _created(call, [dim for dim in range(len(call.shape)) if dim - shift not in same])


@rule(*overloads("zeros", "ones", "full", "empty.memory_format"))
def constant(call: Call) -> Iterator[Case]:
    """The same number everywhere: any slice of it can be made in place."""
    yield call.all_whole()
    yield from _created(call, range(len(call.shape)))


def _created(call: Call, dims: Iterable[int]) -> Iterator[Case]:
    """Along these dims all elements are alike, in any order."""
    for dim in dims:
        if call.divides(call.shape[dim]):
            yield call.case({}, Shard(dim))
        if call.number(call.shape[dim]) % (2 * call.size) == 0:
            yield call.case({}, Shard(dim, zigzag(1)))


@rule(*overloads("reshape", "view", "_unsafe_view", "flatten.using_ints"))
def reshape(call: Call) -> Iterator[Case]:
    operand = only(call)
    groups = dim_groups(call, operand.shape, call.shape)
    yield call.all_whole()
    yield call.case({0: PARTIAL}, PARTIAL)
    for source, target in groups:
        yield from _group_cases(call, operand, source, target)


def dim_groups(call: Call, source: Sequence[Size], target: Sequence[Size]) -> list[tuple[range, range]]:
    """Pair the dims of two shapes of equal element count into smallest groups of equal product."""
    groups: list[tuple[range, range]] = []
    i = j = 0
    while i < len(source) and j < len(target):
        start_i, start_j = i, j
        left, right = sympy.sympify(source[i]), sympy.sympify(target[j])
        i, j = i + 1, j + 1
        while sympy.expand(left - right) != 0:
            if call.number(left) <= call.number(right) and i < len(source):
                left, i = left * source[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            else:
                return groups
        groups.append((range(start_i, i), range(start_j, j)))
    return groups


def _group_cases(call: Call, operand: Operand, source: range, target: range) -> Iterator[Case]:
    """A shard cuts the group's elements, in order, into equal runs, one for each index of the dims before it and each of its parts.

    It lands on the dim of the target that has just these runs.
    """
    outer: Size = sympy.Integer(1)
    for dim in source:
        found = operand.found if isinstance(operand.found, Shard) and operand.found.dim == dim else Shard(dim)
        runs = zigzag_runs(found.parts)
        if call.divides(operand.shape[dim]):
            yield from _landing(call, operand, Shard(dim), outer, target)
        if not found.is_plain and (isinstance(found.parts, tuple) or is_by_expert(found)):
            yield from _unchanged(call, operand, found, outer, target)
        elif not found.is_plain:
            yield from _landing(call, operand, found, outer * (found.parts if runs is None else runs), target)
        outer = outer * operand.shape[dim]


def _landing(call: Call, operand: Operand, shard: Shard, runs: Size, target: range) -> Iterator[Case]:
    prefix: Size = sympy.Integer(1)
    for dim in target:
        parts = runs / prefix
        whole = sympy.denom(parts).is_Integer and call.number(runs) % call.number(prefix) == 0
        in_zigzag = zigzag_runs(shard.parts) is not None
        if whole and call.number(call.shape[dim]) % (call.number(parts) * call.size * (1 + in_zigzag)) == 0:
            yield call.case({operand.index: shard}, Shard(dim, zigzag(parts) if in_zigzag else _count(parts)))
            return
        prefix = prefix * call.shape[dim]


def _unchanged(call: Call, operand: Operand, found: Shard, outer: Size, target: range) -> Iterator[Case]:
    """Unequal parts, and rows by expert, pass if their dim stays as it is."""
    prefix: Size = sympy.Integer(1)
    for dim in target:
        if call.shape[dim] == operand.shape[found.dim] and sympy.expand(prefix - outer) == 0:
            yield call.case({operand.index: found}, Shard(dim, found.parts))
            return
        prefix = prefix * call.shape[dim]


def _count(parts: Size) -> int | sympy.Expr:
    return int(parts) if parts.is_Integer else parts


_ALONG = overloads("slice.Tensor", "select.int", "narrow", "constant_pad_nd", "pad", "flip", "roll", "cumsum", "tril", "triu", "unfold")


@rule(*_ALONG, *overloads("repeat_interleave.self_int"))
def along_dims(call: Call) -> Iterator[Case]:
    """Any dim the operator leaves alone may be sharded."""
    operand = only(call)
    touched = {dim % operand.rank for dim in _touched(call, operand)}
    drops = call.target._schema.name == "aten::select"
    dims = {d: d - (drops and min(touched) < d) for d in range(operand.rank) if d not in touched}
    linear = call.target._schema.name not in ("aten::constant_pad_nd", "aten::pad") or not call.arguments.get("value")
    for case in mapped(call, dims):
        if linear or PARTIAL not in case.inputs:
            yield case
    yield from _one_part(call, operand)
    if call.target in overloads("repeat_interleave.self_int") and call["output_size"] is None:
        for dim in touched if call["dim"] is not None or operand.rank == 1 else ():
            if call.divides(operand.shape[dim]):
                yield call.case({0: Shard(dim)}, Shard(dim))  # copies stand next to their original


@rule(*overloads("slice_scatter", "select_scatter"))
def write_along(call: Call) -> Iterator[Case]:
    """Dims that are written in full; the written part of a selected row has one dim less."""
    x, source = call["self"], call["src"]
    own = call["dim"] % x.rank
    drops = source.rank < x.rank
    yield call.all_whole()
    yield call.case({x.index: PARTIAL, source.index: PARTIAL}, PARTIAL)
    all_of_it = not drops and source.shape[own] == x.shape[own] and not call["start"] and call["step"] == 1
    for dim in range(x.rank):
        if (dim != own or all_of_it) and call.divides(x.shape[dim]):
            yield call.case({x.index: Shard(dim), source.index: Shard(dim - (drops and dim > own))}, Shard(dim))
    for operand, found in strided_inputs(call):
        dim = found.dim + (drops and operand is source and found.dim >= own)
        if dim != own:
            placed: dict[int, Placement] = {x.index: Shard(dim, found.parts), source.index: Shard(dim - (drops and dim > own), found.parts)}
            yield call.case(placed, Shard(dim, found.parts))


@rule(*overloads("repeat"))
def repeat(call: Call) -> Iterator[Case]:
    """Dims that are not repeated."""
    operand = only(call)
    shift = len(call.shape) - operand.rank
    yield from mapped(call, {dim: dim + shift for dim in range(operand.rank) if call["repeats"][dim + shift] == 1})


def _touched(call: Call, operand: Operand) -> list[int]:
    name = call.target._schema.name.removeprefix("aten::")
    if name in ("constant_pad_nd", "pad"):
        padding = call["pad"]
        return [operand.rank - 1 - i // 2 for i in range(len(padding)) if padding[i] != 0]
    if name in ("tril", "triu"):
        return [-2, -1]
    if name in ("flip", "roll"):
        return list(call["dims"]) or list(range(operand.rank))
    if name == "unfold":
        return [call["dimension"]]
    return [call["dim"]] if call["dim"] is not None else list(range(operand.rank))


def _one_part(call: Call, operand: Operand) -> Iterator[Case]:
    """A slice that takes exactly one part of a strided shard (``fused[..., d:2*d]``) is a plain shard of that part."""
    found = operand.found
    if call.target._schema.name != "aten::slice" or not isinstance(found, Shard) or found.is_plain or call["step"] != 1:
        return
    if found.dim == call["dim"] % operand.rank and _is_part(call, found, operand.shape[found.dim]):
        yield call.case({0: found}, Shard(found.dim))


def _is_part(call: Call, found: Shard, length: Size) -> bool:
    """Bounds are global before lowering and divided by the ranks after it; the output's length tells by how much."""
    start, end, taken = call["start"] or 0, call["end"], call.shape[found.dim]
    last = end is None or (isinstance(end, int) and (end >= TO_THE_END or (length.is_Integer and end >= int(length))))
    for first, stop in _bounds(found, length):
        if stop - first != taken:
            continue
        ratio = (first / start if start else sympy.Integer(1)) if last else taken / (end - start)
        if ratio.is_Integer and ratio > 0 and start * ratio == first and (not last or stop == length):
            return True
    return False


def _bounds(found: Shard, length: Size) -> list[tuple[Any, Any]]:
    if isinstance(found.parts, tuple):
        sizes: list[Any] = list(found.parts)
    elif isinstance(found.parts, int):
        sizes = [length / found.parts] * found.parts
    else:
        return []
    edges = [sum(map(sympy.sympify, sizes[:i]), start=sympy.Integer(0)) for i in range(len(sizes) + 1)]
    return list(itertools.pairwise(edges))


@rule(*overloads("cat", "stack"))
def join(call: Call) -> Iterator[Case]:
    rank = len(call.shape)
    dim = call["dim"] % rank
    shift = call.target._schema.name == "aten::stack"
    yield call.all_whole()
    yield call.case({o.index: PARTIAL for o in call.operands}, PARTIAL)
    for out in range(rank):
        own = out - (shift and out > dim)
        if out != dim and call.divides(call.shape[out]):
            yield call.case({o.index: Shard(own) for o in call.operands}, Shard(out))
    for _, found in strided_inputs(call)[:1]:
        out = found.dim + (shift and found.dim >= dim)
        if out != dim:
            yield call.case({o.index: found for o in call.operands}, Shard(out, found.parts))
    if not shift and all(call.divides(o.shape[dim]) for o in call.operands):
        yield from _parts_joined(call, dim)


def _parts_joined(call: Call, dim: int) -> Iterator[Case]:
    """Shards joined along their own dim: every operand is a part of a strided shard."""
    lengths = [o.shape[dim] for o in call.operands]
    placed: dict[int, Placement] = {o.index: Shard(dim) for o in call.operands}
    if len(set(lengths)) == 1:
        yield call.case(placed, Shard(dim, len(lengths)))
    elif all(length.is_Integer for length in lengths):
        yield call.case(placed, Shard(dim, tuple(int(length) for length in lengths)))


@rule(*overloads("split.Tensor", "split_with_sizes", "chunk", "unbind.int"))
def split(call: Call) -> Iterator[Case]:
    operand = only(call)
    dim = call["dim"] % operand.rank
    drops = call.target._schema.name == "aten::unbind"
    yield call.all_whole()
    yield call.case({0: PARTIAL}, PARTIAL)
    for own in range(operand.rank):
        if own != dim and call.divides(operand.shape[own]):
            yield call.case({0: Shard(own)}, Shard(own - (drops and own > dim)))
    found = operand.found
    if isinstance(found, Shard) and found.dim != dim and not found.is_plain:
        yield call.case({0: found}, Shard(found.dim - (drops and found.dim > dim), found.parts))
    if isinstance(found, Shard) and found.dim == dim and not drops and _same_parts(call, found, dim):
        yield call.case({0: found}, Shard(dim))


def _same_parts(call: Call, found: Shard, dim: int) -> bool:
    """Do the pieces of the split coincide with the parts of the strided shard?"""
    pieces = [shape[dim] for shape in call.outputs]
    if isinstance(found.parts, tuple):
        return pieces == list(found.parts)
    return isinstance(found.parts, int) and len(pieces) == found.parts and len(set(pieces)) == 1


@rule(operator.getitem)
def getitem(call: Call) -> Iterator[Case]:
    """Only reached for one-output operators; outputs of others are placed with their operator."""
    yield Case((WHOLE,), (WHOLE,))

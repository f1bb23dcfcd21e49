"""Sizes inside a body: read from the shapes of its inputs, computed from there, rebuilt whenever local shapes change."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from hgc.errors import ShardingError
from hgc.ir.placement import Shard
from hgc.ir.rules.core import TO_THE_END, named_arguments, overloads
from hgc.ir.value import Info, Size, Value, info, is_size, set_info

SYM_SIZE = torch.ops.aten.sym_size.int

SHAPE_ARGUMENT: dict[Any, int] = {
    **dict.fromkeys(overloads("reshape", "view", "_unsafe_view", "expand", "broadcast_to"), 1),
    **dict.fromkeys(overloads("zeros", "ones", "full", "empty.memory_format"), 0),
    **dict.fromkeys(overloads("new_zeros", "new_ones", "new_full"), 1),
}
"""Operators whose argument at this position is the shape of their output, so the local one on each rank."""

SPLIT, SLICE = torch.ops.aten.split.Tensor, torch.ops.aten.slice.Tensor
SPLITS = (SPLIT, torch.ops.aten.split_with_sizes.default)

_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {"FloorDiv": operator.floordiv, "Mod": operator.mod, "PythonMod": operator.mod}


class SizeBuilder:
    """Emits size nodes at the top of a body, each expression once."""

    def __init__(self, graph: fx.Graph, mesh: Mapping[str, int]) -> None:
        self.graph = graph
        self.known: dict[Size, fx.Node] = {}
        self.dims: dict[Size, tuple[fx.Node, int]] = {}
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        self.before = next((n for n in graph.nodes if n.op != "placeholder"), None)
        for node in inputs:
            found = info(node).value
            assert isinstance(found, Value)
            for dim, size in enumerate(found.local_shape(dict(mesh))):
                if not size.is_Integer:
                    self.dims.setdefault(size, (node, dim))

    def emit(self, size: Any) -> int | fx.Node:
        """A node (or an integer) that computes ``size``."""
        size = sympy.sympify(size)
        if size.is_Integer:
            return int(size)
        if size not in self.known:
            self.known[size] = self._dim(size) if size in self.dims else self._compute(size)
        return self.known[size]

    def _dim(self, size: Size) -> fx.Node:
        node, dim = self.dims[size]
        return self._call(SYM_SIZE, (node, dim), size)

    def _call(self, target: Any, args: tuple[Any, ...], size: Size) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args)
        set_info(node, Info(size=size))
        return node

    def _compute(self, size: Size) -> fx.Node:
        reads = {symbol: self._read(symbol, size) for symbol in sorted(size.free_symbols, key=str)}
        replaced = sympy.simplify(size.subs({s: stand_in / ratio for s, (stand_in, _, ratio) in reads.items()}))
        nodes = {stand_in: node for stand_in, node, _ in reads.values()}
        result = self._arithmetic(replaced, nodes, {stand_in: ratio * s for s, (stand_in, _, ratio) in reads.items()})
        assert isinstance(result, fx.Node)
        set_info(result, Info(size=size))  # as it was asked for: the same number may have been rewritten
        return result

    def _read(self, symbol: sympy.Symbol, wanted: Size) -> tuple[sympy.Symbol, fx.Node, Size]:
        """A stand-in for an input dim that is a multiple ``ratio`` of the symbol."""
        for size in self.dims:
            ratio = size / symbol
            if ratio.is_Rational:
                node = self.emit(size)
                assert isinstance(node, fx.Node)
                return sympy.Symbol(f"_{node.name}", integer=True, positive=True), node, ratio
        raise ShardingError(f"size {wanted} needs {symbol}, which no input of the block carries")

    def _arithmetic(self, size: Size, nodes: Mapping[sympy.Symbol, fx.Node], meaning: Mapping[sympy.Symbol, Size]) -> Any:
        def go(e: Size) -> Any:
            return self._arithmetic(e, nodes, meaning)

        def call(target: Any, left: Any, right: Any, e: Size) -> Any:
            if isinstance(left, int) and isinstance(right, int):
                return target(left, right)
            return self._call(target, (left, right), e.subs(meaning))

        if size.is_Integer:
            return int(size)
        if size in nodes:
            return nodes[size]
        numerator, denominator = size.as_numer_denom()
        if denominator != 1:
            return call(operator.floordiv, go(numerator), go(denominator), size)
        if isinstance(size, sympy.Pow) and size.exp.is_Integer:
            return call(operator.mul, go(size.base), go(size.base ** (size.exp - 1)), size)
        if isinstance(size, sympy.Mul | sympy.Add):
            head, *rest = sorted(size.args, key=lambda e: (e.is_Integer, str(e)))
            target = operator.mul if isinstance(size, sympy.Mul) else operator.add
            return call(target, go(head), go(size.func(*rest)), size)
        if isinstance(size, sympy.floor):
            numerator, denominator = size.args[0].as_numer_denom()
            return call(operator.floordiv, go(numerator), go(denominator), size)
        name = type(size).__name__
        if name in _FUNCTIONS:
            return call(_FUNCTIONS[name], go(size.args[0]), go(size.args[1]), size)
        raise ShardingError(f"cannot compute the size {size} at run time: no operator for {name}")


def rebuild_sizes(graph: fx.Graph, mesh: Mapping[str, int], axis: str) -> None:
    """Make every size argument right for local shapes, ``axis`` being the one just lowered.

    Shapes and lengths of pieces follow the outputs, a slice that takes one part of a strided shard shrinks with it; every other size stays.
    """
    builder = SizeBuilder(graph, mesh)
    old = [n for n in graph.nodes if is_size(n)]
    for node in graph.nodes:
        if node.op != "call_function" or is_size(node):
            continue
        if node.target in SHAPE_ARGUMENT:
            _set_shape(node, builder, mesh)
        elif node.target in SPLITS:
            _set_pieces(node, mesh)
        elif node.target is SLICE and _cuts_a_part(node, axis):
            _shrink(node, mesh[axis])
        else:
            node.args = fx.map_arg(node.args, lambda a: builder.emit(info(a).size) if is_size(a) else a)
            node.kwargs = fx.map_arg(node.kwargs, lambda a: builder.emit(info(a).size) if is_size(a) else a)
    for node in reversed(old):
        if not node.users:
            graph.erase_node(node)


def _set_shape(node: fx.Node, builder: SizeBuilder, mesh: Mapping[str, int]) -> None:
    position = SHAPE_ARGUMENT[node.target]
    found = info(node).value
    assert isinstance(found, Value)
    local = found.local_shape(dict(mesh))
    given = node.args[position]
    assert isinstance(given, list | tuple)
    node.update_arg(position, [-1 if size == -1 else builder.emit(shape) for size, shape in zip(given, local, strict=True)])


def _set_pieces(node: fx.Node, mesh: Mapping[str, int]) -> None:
    """Lengths of a split's pieces, as every rank has them."""
    values = info(node).value
    assert isinstance(values, tuple)
    dim = split_dim(node)
    lengths = [value.local_shape(dict(mesh))[dim] for value in values]
    if all(length.is_Integer for length in lengths):
        pieces = [int(length) for length in lengths]
        node.update_arg(1, pieces[0] if node.target is SPLIT else pieces)


def split_dim(node: fx.Node) -> int:
    dim = named_arguments(node)["dim"]
    values = info(node).value
    assert isinstance(values, tuple)
    assert isinstance(dim, int)
    return dim % len(values[0].shape)


def _cuts_a_part(node: fx.Node, axis: str) -> bool:
    """Is the slice along the dim that this axis shards?"""
    value = info(node).value
    assert isinstance(value, Value)
    placement = value.on(axis)
    return isinstance(placement, Shard) and placement.dim == named_arguments(node)["dim"] % len(value.shape)


def _shrink(node: fx.Node, ranks: int) -> None:
    source, dim, start, end = (named_arguments(node)[name] for name in ("self", "dim", "start", "end"))
    node.args = (source, dim, (start or 0) // ranks, end // ranks if isinstance(end, int) and end < TO_THE_END else end)

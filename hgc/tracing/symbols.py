"""Sizes: from the tracer's own symbols to the program's, and from expressions to the nodes that compute them."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from hgc._torch_compat import size_functions
from hgc.errors import TraceError
from hgc.ir.value import Info, Size, Value, info, set_info

aten = torch.ops.aten


def symbol(name: str) -> sympy.Symbol:
    """A size symbol of the program."""
    return sympy.Symbol(name, integer=True, positive=True)


def raw(size: int | torch.SymInt) -> sympy.Expr:
    """The tracer's expression of a size."""
    if isinstance(size, torch.SymInt):
        expr = size.node.expr
        assert isinstance(expr, sympy.Expr)
        return expr
    return sympy.Integer(int(size))


class Renaming:
    """Rewrites the tracer's expressions in the program's symbols, with sympy's own functions only."""

    def __init__(self, symbols: Mapping[sympy.Symbol, sympy.Expr]) -> None:
        self.symbols = dict(symbols)
        self._done: dict[sympy.Expr, sympy.Expr] = {}

    def __call__(self, expr: sympy.Expr) -> sympy.Expr:
        if expr.is_Integer:
            return expr
        if expr not in self._done:
            self._done[expr] = _plain(expr).xreplace(self.symbols)
        return self._done[expr]

    def relation(self, relation: sympy.Basic) -> sympy.Basic:
        """A boolean relation between sizes; sympy evaluates it if it can."""
        found = _plain(relation).xreplace(self.symbols)
        assert isinstance(found, sympy.Basic)
        return found

    def size(self, size: int | torch.SymInt) -> sympy.Expr:
        return self(raw(size))


def _plain(expr: sympy.Basic) -> Any:
    """Replace torch's own sympy functions by sympy's, bottom up."""
    if not expr.args:
        return expr
    args = [_plain(a) for a in expr.args]
    rewrite = _REWRITES.get(type(expr))
    return rewrite(*args) if rewrite is not None else expr.func(*args)


_REWRITES: dict[Any, Callable[..., sympy.Expr]] = {
    size_functions.FloorDiv: lambda a, b: sympy.floor(a / b),
    size_functions.CleanDiv: lambda a, b: a / b,
    size_functions.CeilToInt: sympy.ceiling,
    size_functions.FloorToInt: sympy.floor,
    size_functions.IntTrueDiv: lambda a, b: a / b,
    size_functions.Mod: sympy.Mod,
    size_functions.PythonMod: sympy.Mod,
    size_functions.ModularIndexing: lambda a, b, c: sympy.Mod(sympy.floor(a / b), c),
    size_functions.Max: sympy.Max,
    size_functions.Min: sympy.Min,
    size_functions.ToFloat: lambda a: a,
    size_functions.OpaqueUnaryFn_sqrt: sympy.sqrt,
}


RAW_FUNCTIONS: dict[type, Callable[..., Any]] = {
    size_functions.FloorDiv: operator.floordiv,
    size_functions.CleanDiv: operator.floordiv,
    size_functions.CeilToInt: math.ceil,
    size_functions.FloorToInt: math.floor,
    size_functions.IntTrueDiv: operator.truediv,
    size_functions.Mod: operator.mod,
    size_functions.PythonMod: operator.mod,
    size_functions.ModularIndexing: lambda a, b, c: a // b % c,
    size_functions.Max: max,
    size_functions.Min: min,
    size_functions.ToFloat: float,
    size_functions.OpaqueUnaryFn_sqrt: math.sqrt,
}
"""How to evaluate the tracer's own functions."""


class SizeBuilder:
    """Builds, in a body, the nodes that compute sizes from the shapes of the body's own inputs.

    A node is appended when its expression is first asked for, so that it stands in front of its first user.
    """

    def __init__(self, graph: fx.Graph, inputs: Iterable[fx.Node]) -> None:
        self.graph = graph
        self.inputs = list(inputs)
        self._built: dict[Size, fx.Node | int] = {}

    def can_build(self, expr: Size) -> bool:
        return all(self._source(s) is not None for s in expr.free_symbols) or self._source(expr) is not None

    def __call__(self, expr: Size) -> fx.Node | int | float:
        if expr.is_Integer:
            return int(expr)
        if expr.is_Float or expr.is_Rational:
            return float(expr)
        if expr not in self._built:
            self._built[expr] = self._build(expr)
        return self._built[expr]

    def _source(self, expr: Size) -> tuple[fx.Node, int] | None:
        for node in self.inputs:
            value = info(node).value
            assert isinstance(value, Value)
            if expr in value.shape:
                return node, value.shape.index(expr)
        return None

    def _build(self, expr: Size) -> fx.Node:
        found = self._source(expr)
        if found is not None and (expr.is_Symbol or not self._has_all_symbols(expr)):
            return self._node(aten.sym_size.int, found, expr)
        if isinstance(expr, sympy.Add | sympy.Mul):
            return self._arithmetic(expr)
        if isinstance(expr, sympy.floor):
            over, under = sympy.fraction(sympy.together(expr.args[0]))
            return self._node(operator.floordiv, (self(over), self(under)), expr)
        if isinstance(expr, sympy.ceiling):
            over, under = sympy.fraction(sympy.together(expr.args[0]))
            return self._node(operator.floordiv, (self(over + under - 1), self(under)), expr)
        if isinstance(expr, sympy.Mod):
            return self._node(operator.mod, tuple(self(a) for a in expr.args), expr)
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return self._node(operator.mul, (self(expr.base), self(expr.base ** (expr.exp - 1))), expr)
        if isinstance(expr, sympy.Max | sympy.Min):
            function = torch.sym_max if isinstance(expr, sympy.Max) else torch.sym_min
            first, *rest = (self(a) for a in expr.args)
            for other in rest:
                first = self._node(function, (first, other), expr)
            assert isinstance(first, fx.Node)
            return first
        if any(re.fullmatch(r"z?uf?\d+", str(s)) for s in expr.free_symbols):  # torch's names for what only running can tell
            raise TraceError(
                "The model reads the value of a tensor as a number (.item(), int() or float() of it), which differs from batch to batch; "
                "keep it a tensor, or pass the number as a constant input."
            )
        raise TraceError(
            f"The model computes the size {expr}, which hgc cannot rebuild from tensor shapes; "
            "pass dynamic={} to trace with the example's sizes only."
        )

    def _has_all_symbols(self, expr: Size) -> bool:
        return all(self._source(s) is not None for s in expr.free_symbols)

    def _arithmetic(self, expr: sympy.Add | sympy.Mul) -> fx.Node:
        """``a + b - c`` and ``a * b // c``: integer operators only, because sizes are integers."""
        if isinstance(expr, sympy.Mul):
            over, under = sympy.fraction(expr)
            if under != 1:
                return self._node(operator.floordiv, (self(over), self(under)), expr)
        terms = sorted(expr.args, key=lambda t: (t.is_number, t.could_extract_minus_sign(), str(t)))
        total, value = terms[0], self(terms[0])
        for term in terms[1:]:
            if isinstance(expr, sympy.Mul):
                total = total * term
                value = self._cached(operator.mul, (value, self(term)), total)
            elif term.could_extract_minus_sign():
                total = total + term
                value = self._cached(operator.sub, (value, self(-term)), total)
            else:
                total = total + term
                value = self._cached(operator.add, (value, self(term)), total)
        assert isinstance(value, fx.Node)
        return value

    def _cached(self, target: Any, args: tuple[Any, ...], expr: Size) -> fx.Node:
        found = self._built.get(expr)
        if not isinstance(found, fx.Node):
            found = self._built[expr] = self._node(target, args, expr)
        return found

    def _node(self, target: Any, args: tuple[Any, ...], expr: Size) -> fx.Node:
        name = str(expr) if expr.is_Symbol else None
        node = self.graph.create_node("call_function", target, args, name=name)
        set_info(node, Info(size=expr))
        return node

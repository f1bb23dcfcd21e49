"""Numbers for symbols: evaluate size expressions, and check that inputs have sizes the program was traced for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import sympy
from torch import Tensor

from hgc.errors import HgcError
from hgc.ir.value import value

if TYPE_CHECKING:
    from hgc.ir.program import Program

Functions = Mapping[type, Callable[..., Any]]

_FUNCTIONS: dict[type, Callable[..., Any]] = {
    sympy.Add: lambda *args: sum(args),
    sympy.Mul: lambda *args: math.prod(args),
    sympy.Pow: lambda a, b: a**b,
    sympy.floor: math.floor,
    sympy.ceiling: math.ceil,
    sympy.Mod: lambda a, b: a % b,
    sympy.Max: max,
    sympy.Min: min,
    sympy.Eq: lambda a, b: a == b,
    sympy.Ne: lambda a, b: a != b,
    sympy.Lt: lambda a, b: a < b,
    sympy.Le: lambda a, b: a <= b,
    sympy.Gt: lambda a, b: a > b,
    sympy.Ge: lambda a, b: a >= b,
    sympy.And: lambda *args: all(args),
    sympy.Or: lambda *args: any(args),
    sympy.Not: lambda a: not a,
}


def evaluate(expr: sympy.Basic, sizes: Mapping[sympy.Symbol, int], more: Functions | None = None) -> Any:
    """The value of an expression or relation in plain numbers, much faster than sympy's substitution.

    ``more`` adds functions by sympy class. Raises ``KeyError`` for a symbol without a size or a function that is not known.
    """
    if expr.is_Symbol:
        return sizes[expr]
    if expr.is_Integer:
        return int(expr)
    if expr.is_Rational:
        return sympy.Rational(expr)
    if expr.is_number or not expr.args:
        return bool(expr) if expr in (sympy.true, sympy.false) else float(expr)
    function = _FUNCTIONS.get(type(expr)) or (more or {})[type(expr)]
    return function(*(evaluate(argument, sizes, more) for argument in expr.args))


def input_sizes(program: Program, inputs: Mapping[str, Tensor]) -> dict[sympy.Symbol, int]:
    """The size of each symbol, read from the inputs' shapes.

    Raises ``HgcError`` if an input is missing, if a shape disagrees, or if tracing assumed something that these sizes break.
    """
    sizes: dict[sympy.Symbol, int] = {}
    for node in program.inputs():
        name = str(node.target)
        if name not in inputs:
            raise HgcError(f"The program needs an input {name!r} and got {', '.join(inputs) or 'none'}; add it to the batch.")
        expected, found = value(node).shape, tuple(inputs[name].shape)
        if len(expected) != len(found):
            raise HgcError(f"Input {name!r} has shape {list(found)}, the program was traced with {len(expected)} dims {_text(expected)}.")
        for dim, (wanted, size) in enumerate(zip(expected, found, strict=True)):
            if wanted.is_Symbol:
                wanted = sympy.Integer(sizes.setdefault(wanted, size))
            if wanted.is_Integer and wanted != size:
                raise HgcError(
                    f"Input {name!r} has size {size} in dim {dim} where {_text(expected)} and the other inputs ask for {wanted}."
                )
    _check_assumptions(program, sizes)
    return sizes


def _check_assumptions(program: Program, sizes: Mapping[sympy.Symbol, int]) -> None:
    for symbol, size in sizes.items():
        found = program.symbols.get(symbol)
        if found is not None and not (found.low <= size and (found.high is None or size <= found.high)):
            limit = f"at least {found.low}" if found.high is None else f"{found.low} to {found.high}"
            raise HgcError(
                f"The {found.meaning} size {symbol} is {size}, the model was traced for {limit}; trace it again with such inputs."
            )
    for relation in program.assumptions:
        if relation.free_symbols <= set(sizes) and not evaluate(relation, sizes):
            given = ", ".join(f"{symbol} = {sizes[symbol]}" for symbol in sorted(relation.free_symbols, key=str))
            raise HgcError(f"The model was traced for sizes with {relation}, which {given} breaks; trace it again with such inputs.")


def _text(shape: tuple[sympy.Expr, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"

"""How sizes read: capitals for the sizes of the whole batch, small letters for what one rank holds of them."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx

from hgc.backends.torchrun.expressions import Binding, Expression, binary, call, literal
from hgc.backends.torchrun.names import MODULE_NAMES, Scope, comment
from hgc.errors import ArtifactError
from hgc.ir.program import Program
from hgc.ir.value import Size, Value, info, is_size


@dataclass(frozen=True)
class Symbols:
    """Display names of a program's size symbols, and its mesh."""

    names: Mapping[sympy.Symbol, str]
    mesh: Mapping[str, int]

    @staticmethod
    def of(program: Program) -> Symbols:
        scope = Scope(MODULE_NAMES)
        return Symbols({symbol: scope.take(str(symbol).upper(), "SIZE") for symbol in program.symbols}, dict(program.mesh))

    def text(self, size: Size) -> str:
        """An expression in display names, for comments and for ``PLAN``."""
        named = size.subs(
            {symbol: sympy.Symbol(name, integer=True, positive=True) for symbol, name in self.names.items()}, simultaneous=True
        )
        return comment(str(named))

    def local_shape(self, value: Value, named: Mapping[Size, str] | None = None) -> str:
        """``[B/2, S, 256]``: what one rank holds; sizes that are ``named`` go by their variable."""
        known = named or {}
        return f"[{', '.join(known.get(size) or self.text(size) for size in value.local_shape(dict(self.mesh)))}]"


_BINARY: dict[Any, tuple[str, Binding]] = {
    operator.mul: ("*", Binding.PRODUCT),
    operator.add: ("+", Binding.SUM),
    operator.sub: ("-", Binding.SUM),
    operator.floordiv: ("//", Binding.PRODUCT),
    operator.truediv: ("/", Binding.PRODUCT),
    operator.mod: ("%", Binding.PRODUCT),
    operator.pow: ("**", Binding.POWER),
}
_CALLS: dict[Any, str] = {
    torch.sym_max: "max",
    torch.sym_min: "min",
    torch.sym_int: "int",
    torch.sym_float: "float",
    torch.sym_sqrt: "math.sqrt",
}


_SHORT = 9
"""Arithmetic of so many characters is written where it is used, longer one gets a variable."""


@dataclass
class SizeNames:
    """Size variables of one body, each defined once at its top, in the order in which the body asks for them.

    Sizes are read off the shapes of ``inputs`` (and products of those), whatever route the graph takes to them.
    """

    symbols: Symbols
    scope: Scope
    inputs: Sequence[fx.Node]
    names: dict[Size, str] = field(default_factory=dict)
    read: list[Size] = field(default_factory=list)
    computed: dict[str, str] = field(default_factory=dict)

    def expression(self, node: fx.Node) -> Expression:
        """Source for a size node."""
        size = info(node).size
        assert size is not None
        found = self._from_dims(size)
        if found is not None:
            return found
        text = self._arithmetic(node)
        if not size.is_Symbol and len(text.text) <= _SHORT and len(self.symbols.text(size)) <= 2 * _SHORT:
            return text
        name = self._name(size)
        self.computed[name] = text.text
        return Expression(name)

    @property
    def composite(self) -> dict[Size, str]:
        """Variables that stand for more than a symbol or a share of one."""
        return {size: name for size, name in self.names.items() if name in self.computed and not size.is_Symbol}

    def _from_dims(self, size: Size) -> Expression | None:
        """A variable, or a product of two."""
        known = {size: None for node in self.inputs for size in self._dims(node)}
        if size in self.names or size in known:
            return Expression(self._variable(size))
        for first, second in itertools.combinations_with_replacement(known, 2):
            if size == first * second:
                left, right = (Expression(self._variable(factor)) for factor in (first, second))
                return binary(left, "*", right, Binding.PRODUCT)
        return None

    def _dims(self, node: fx.Node) -> dict[Size, int]:
        """Sizes that are dims of an input, and where."""
        value = info(node).value
        assert isinstance(value, Value)
        found: dict[Size, int] = {}
        for dim, size in enumerate(value.local_shape(dict(self.symbols.mesh))):
            if not size.is_Integer:
                found.setdefault(size, dim)
        return found

    def _variable(self, size: Size) -> str:
        if size not in self.names:
            self.read.append(size)
            self._name(size)
        return self.names[size]

    def _name(self, size: Size) -> str:
        symbols = sorted(size.free_symbols, key=str)
        whole = self.symbols.names[symbols[0]] if symbols else "n"
        if not size.is_Symbol:
            part_of_one = len(symbols) == 1 and (symbols[0] / size).is_Integer
            whole = whole.lower() if part_of_one else "n"
        self.names[size] = self.scope.take(whole, "size")
        return self.names[size]

    def _arithmetic(self, node: fx.Node) -> Expression:
        args = [self.expression(a) if isinstance(a, fx.Node) and is_size(a) else literal(a) for a in node.args]
        if node.target in _BINARY:
            symbol, binding = _BINARY[node.target]
            left, right = args
            if node.target is operator.mul and isinstance(node.args[1], int):
                left, right = right, left
            return binary(left, symbol, right, binding)
        if node.target in _CALLS:
            return call(_CALLS[node.target], (a.text for a in args))
        raise ArtifactError(f"the size {info(node).size} is computed by {node.target!r}, which has no source form")

    def lines(self, name_of: Mapping[fx.Node, str]) -> Iterator[str]:
        """Definitions of the variables that were asked for: shapes unpacked, from as few tensors as possible, then arithmetic."""
        missing = list(self.read)
        while missing:
            source = max(self.inputs, key=lambda node: sum(size in self._dims(node) for size in missing))
            dims = {self._dims(source)[size]: self.names[size] for size in missing if size in self._dims(source)}
            value = info(source).value
            assert isinstance(value, Value)
            yield from _unpack(name_of[source], len(value.shape), dims)
            missing = [size for size in missing if size not in self._dims(source)]
        yield from (f"{name} = {text}" for name, text in self.computed.items())


def _unpack(tensor: str, rank: int, dims: Mapping[int, str]) -> Iterator[str]:
    if len(dims) == 1:
        ((dim, name),) = dims.items()
        yield f"{name} = {tensor}.shape[{dim}]"
        return
    last = max(dims) + 1
    targets = ", ".join(dims.get(dim, "_") for dim in range(last))
    yield f"{targets} = {tensor}.shape" + (f"[:{last}]" if last < rank else "")

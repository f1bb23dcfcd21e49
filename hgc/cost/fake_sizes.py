"""Sizes of fake tensors: from the program's expressions to torch's symbolic integers, and back."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch

from hgc._torch_compat import fixed_sizes, symbolic_size
from hgc.ir.input_sizes import evaluate
from hgc.ir.program import SymbolInfo
from hgc.ir.value import Size
from hgc.tracing.symbols import Renaming


class FakeSizes:
    """Each symbol of the program becomes a multiple of the number of ranks, so that the sizes of parts are whole numbers.

    Python code in operators branches as for sizes near the traced ones, or for exactly those if tracing had to assume something about them.
    """

    def __init__(self, fake_mode: Any, mesh: Mapping[str, int], symbols: Mapping[sympy.Symbol, SymbolInfo], as_traced: bool) -> None:
        self._mode = fake_mode
        self._ranks = math.prod(mesh.values())
        self._units: dict[sympy.Symbol, torch.SymInt] = {}  # stand-in of a symbol, in units of the ranks -> torch's size
        self._meaning: dict[sympy.Symbol, Size] = {}  # torch's symbol -> expression of the program
        self._stand_in: dict[sympy.Symbol, Size] = {}
        self._fresh: dict[Size, torch.SymInt] = {}
        primes = _primes()
        for symbol, found in symbols.items():
            near = next(p for p in primes if p * self._ranks >= found.hint)
            unit = symbolic_size(fake_mode, max(found.hint // self._ranks, 2) if as_traced else near)
            stand_in = sympy.Symbol(f"unit_{symbol.name}", integer=True, positive=True)
            self._units[stand_in] = unit
            self._stand_in[symbol] = self._ranks * stand_in
            self._meaning[unit.node.expr] = symbol / self._ranks
        self._rename = Renaming(self._meaning)

    def make(self, size: Size) -> int | torch.SymInt:
        """A size for a fake tensor."""
        if size.is_Integer:
            return int(size)
        local = sympy.expand(size.xreplace(self._stand_in))
        if local.is_polynomial() and all(number.is_Integer for number in local.atoms(sympy.Rational)):
            made: int | torch.SymInt = evaluate(local, self._units)  # type: ignore[arg-type]
            return made
        if size not in self._fresh:
            hint = int(evaluate(local, {stand_in: unit.node.hint for stand_in, unit in self._units.items()}))
            self._fresh[size] = symbolic_size(self._mode, max(hint, 2))
            self._meaning[self._fresh[size].node.expr] = size
            self._rename = Renaming(self._meaning)
        return self._fresh[size]

    def expression(self, size: Any) -> Size:
        """The program's expression of what torch computed from these sizes."""
        return sympy.expand(self._rename.size(size))

    def notes(self, where: str) -> Iterator[str]:
        """A sentence for each size that an operator has pinned."""
        names = {str(raw): meaning for raw, meaning in self._meaning.items()}
        for name in fixed_sizes(self._mode):
            if name in names:
                yield f"the costs of {where} hold for the traced value of {names[name]} only: an operator depends on it"


def _primes() -> Iterator[int]:
    """From 5 on, so that no two sizes agree and none is like another."""
    number = 3
    while True:
        number += 2
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2)):
            yield number

"""Relations between sizes that tracing relied on: a branch taken, a division without remainder."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

import sympy

from hgc.ir.program import SymbolInfo
from hgc.tracing.symbols import Renaming

_SAMPLES = 24


def find_assumptions(guards: Iterable[sympy.Basic], renaming: Renaming, symbols: Mapping[sympy.Symbol, SymbolInfo]) -> tuple[sympy.Basic, ...]:
    """The guards that some legal sizes violate, in the program's symbols.

    Most guards of a trace hold for all sizes (``8 * (s // 8) <= s``), which sympy cannot prove; those that hold for every one of a spread of sizes are
    taken as true. What one symbol's range says already is left out.
    """
    samples = _samples(symbols)
    found: dict[sympy.Basic, None] = {}
    for guard in guards:
        own = renaming.relation(guard)
        if own.free_symbols and own.free_symbols <= set(symbols) and not all(holds(own, sizes) for sizes in samples):
            found[own] = None
    return tuple(found)


def holds(relation: sympy.Basic, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether the relation is true for these sizes; true if it cannot be decided."""
    return relation.xreplace({symbol: sympy.Integer(size) for symbol, size in sizes.items()}) is not sympy.false


def violated(assumptions: Iterable[sympy.Basic], sizes: Mapping[sympy.Symbol, int]) -> list[sympy.Basic]:
    return [relation for relation in assumptions if not holds(relation, sizes)]


def _samples(symbols: Mapping[sympy.Symbol, SymbolInfo]) -> list[dict[sympy.Symbol, int]]:
    """Combinations of small and large, even and odd sizes; never 1, which tracing treats apart."""
    spread = (2, 3, 4, 5, 6, 8, 12, 16, 17, 31, 32, 64, 100, 127, 128, 256, 510, 1024)
    choices = []
    for offset, (symbol, found) in enumerate(symbols.items()):
        low = max(found.low, 2)
        legal = [size for size in spread if low <= size and (found.high is None or size <= found.high)] or [low]
        turned = [legal[(i * (2 * offset + 1) + offset) % len(legal)] for i in range(_SAMPLES)]
        choices.append([(symbol, size) for size in turned])
    return [dict(combination) for combination in itertools.islice(zip(*choices, strict=True), _SAMPLES)] if choices else []

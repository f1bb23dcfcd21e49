"""Relations between sizes that tracing relied on: a branch taken, a division without remainder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import sympy

from hgc.ir.input_sizes import evaluate
from hgc.ir.program import SymbolInfo
from hgc.tracing.symbols import RAW_FUNCTIONS, Renaming

_SAMPLES = 32


def find_assumptions(
    guards: Iterable[sympy.Basic], renaming: Renaming, symbols: Mapping[sympy.Symbol, SymbolInfo]
) -> tuple[sympy.Basic, ...]:
    """The strongest guards that some legal sizes violate, in the program's symbols.

    Most guards of a trace hold for all sizes (``8 * (s // 8) <= s``), which sympy cannot prove; those that hold for every one of
    a spread of sizes are taken as true, and those that hold wherever a stronger one holds are left out.
    """
    samples = _samples(symbols)
    true_in: dict[sympy.Basic, frozenset[int]] = {}
    for guard in guards:
        raw_sizes = [{raw: evaluate(own, sizes) for raw, own in renaming.symbols.items()} for sizes in samples]
        if guard.free_symbols and guard.free_symbols <= set(renaming.symbols):
            true_in[guard] = frozenset(number for number, sizes in enumerate(raw_sizes) if evaluate(guard, sizes, RAW_FUNCTIONS))
    kept: dict[sympy.Basic, frozenset[int]] = {}
    for guard, found in sorted(true_in.items(), key=lambda item: (len(item[1]), len(str(item[0])))):
        if len(found) < len(samples) and not any(stronger <= found for stronger in kept.values()):
            kept[guard] = found
    return tuple(renaming.relation(guard) for guard in kept)


def violated(assumptions: Iterable[sympy.Basic], sizes: Mapping[sympy.Symbol, int]) -> list[sympy.Basic]:
    """The relations that these sizes break."""
    return [relation for relation in assumptions if relation.free_symbols <= set(sizes) and not evaluate(relation, sizes)]


def _samples(symbols: Mapping[sympy.Symbol, SymbolInfo]) -> list[dict[sympy.Symbol, int]]:
    """Combinations of small and large, even and odd sizes; never 1, which tracing treats apart."""
    spread = (2, 3, 4, 5, 6, 8, 12, 16, 17, 31, 32, 64, 100, 127, 128, 256, 510, 1024)
    samples: list[dict[sympy.Symbol, int]] = [{} for _ in range(_SAMPLES)]
    for offset, (symbol, found) in enumerate(symbols.items()):
        low = max(found.low, 2)
        legal = [size for size in spread if low <= size and (found.high is None or size <= found.high)] or [low]
        for number, sample in enumerate(samples):
            sample[symbol] = legal[(number * (2 * offset + 1) + offset) % len(legal)]
    return samples

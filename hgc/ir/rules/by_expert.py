"""Where the rows of sharded tokens live once they are sorted by expert.

Rows sorted by expert on every rank are no shard of the rows sorted by expert on one device: each rank holds some rows of each expert, how
many depends on the data. Two markers stand for that in place of a strided shard's parts. No collective can join such a value, so
it lives between a dispatch and its combine only, where every operator treats rows alike.
"""

from __future__ import annotations

from typing import Any

import sympy

from hgc.ir.placement import Placement, Shard

_ROWS, _ORDER = sympy.Function("expert_rows"), sympy.Function("expert_order")


def rows_of(tokens: Shard) -> Shard:
    """The rows of a rank's tokens, in the order of their experts."""
    return _marked(_ROWS, tokens)


def order_of(tokens: Shard) -> Shard:
    """Where a rank's rows come from, counted in its own tokens; only indexing with it and combining may read that."""
    return _marked(_ORDER, tokens)


def is_by_expert(placement: Placement) -> bool:
    """Rows or order of sharded tokens?"""
    return isinstance(placement, Shard) and getattr(placement.parts, "func", None) in (_ROWS, _ORDER)


def is_order(placement: Placement) -> bool:
    return isinstance(placement, Shard) and getattr(placement.parts, "func", None) == _ORDER


def tokens_of(marked: Placement) -> Shard:
    """Where the tokens live that rows or order were made of."""
    assert isinstance(marked, Shard)
    assert isinstance(marked.parts, sympy.Expr)
    parts = tuple(int(p) if p.is_Integer else p for p in marked.parts.args)
    return Shard(0, parts if len(parts) > 1 else parts[0])


def _marked(marker: Any, tokens: Shard) -> Shard:
    return Shard(0, marker(*tokens.parts) if isinstance(tokens.parts, tuple) else marker(tokens.parts))

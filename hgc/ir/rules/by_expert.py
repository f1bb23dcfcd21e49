"""Where the rows of sharded tokens live once they are sorted by expert.

Rows sorted by expert on every rank are no shard of the rows sorted by expert on one device: each rank holds some rows of each expert, how
many depends on the data. Two markers stand for that in place of a strided shard's parts. No collective can join such a value, so
it lives between a dispatch and its combine only, where every operator treats rows alike.
"""

from __future__ import annotations

import sympy

from hgc.ir.placement import Placement, Shard

_ROWS, _ORDER = "expert_rows", "expert_order"


def rows_of(tokens: Shard) -> Shard:
    """The rows of a rank's tokens, in the order of their experts."""
    return _marked(_ROWS, tokens)


def order_of(tokens: Shard) -> Shard:
    """Where a rank's rows come from, counted in its own tokens; only indexing with it and combining may read that."""
    return _marked(_ORDER, tokens)


def is_by_expert(placement: Placement) -> bool:
    """Rows or order of sharded tokens?"""
    return isinstance(placement, Shard) and str(placement.parts).startswith((_ROWS, _ORDER))


def is_order(placement: Placement) -> bool:
    return isinstance(placement, Shard) and str(placement.parts).startswith(_ORDER)


def _marked(marker: str, tokens: Shard) -> Shard:
    return Shard(0, sympy.Symbol(marker if tokens.is_plain else f"{marker}_{tokens.parts}"))

"""One spelling for each computation: what the passes, the rules and the emitter can rely on."""

from __future__ import annotations

from collections.abc import Mapping

import sympy
from torch import fx

from hgc.ir.program import State, SymbolInfo
from hgc.tracing.normalise.attention import canonical_attention
from hgc.tracing.normalise.cleanup import remove_noops, simplify
from hgc.tracing.normalise.masks import causal_masks
from hgc.tracing.normalise.mutation import make_functional
from hgc.tracing.normalise.operators import canonical_operators
from hgc.tracing.normalise.reshapes import fuse_reshapes


def normalise(
    graph: fx.Graph, holders: dict[fx.Node, str], states: Mapping[str, State], symbols: Mapping[sympy.Symbol, SymbolInfo]
) -> list[str]:
    """Make the flat graph functional, give every computation its one spelling, and drop what does not compute.

    Returns sentences for the program's report.
    """
    notes = make_functional(graph, holders)
    canonical_operators(graph)
    remove_noops(graph)
    fuse_reshapes(graph)
    canonical_attention(graph)
    causal_masks(graph, holders, states, symbols)
    simplify(graph)
    return notes

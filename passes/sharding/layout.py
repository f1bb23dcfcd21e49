"""What a strategy means on one mesh axis: where inputs, parameters and block outputs live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy

from hgc.ir.placement import Invariant, Placement


@dataclass(frozen=True)
class AxisLayout:
    """The decisions that lowering an axis obeys; everything else follows from the rules.

    ``default`` is where state not named in ``state`` lives: ``Replicated`` on a data axis (its gradient is summed once, by the runtime),
    ``Invariant`` on a tensor axis. ``sequence_dim`` is the dim along which 3-D activations leave a block, or None to leave them whole.
    ``divided`` are the size symbols that the axis is there to divide: what varies over them should not be computed whole on every rank.
    ``zigzag``: they are cut in zigzag order. ``methods`` are the methods (``Case.method``) that the axis may use. ``masks`` are the nodes,
    by body and name, that make attention's masks.
    """

    axis: str
    size: int
    default: Placement = field(default_factory=Invariant)
    inputs: Mapping[str, Placement] = field(default_factory=dict)
    state: Mapping[str, Placement] = field(default_factory=dict)
    sequence_dim: int | None = None
    divided: frozenset[sympy.Symbol] = frozenset()
    zigzag: bool = False
    methods: frozenset[str] = frozenset()
    masks: frozenset[tuple[str, str]] = frozenset()

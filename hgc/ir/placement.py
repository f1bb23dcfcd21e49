"""Placements: where a value lives on one mesh axis, and what its gradient is there.

| placement       | value on the ranks of the axis      | gradient on the ranks of the axis |
|-----------------|-------------------------------------|-----------------------------------|
| ``Shard(d)``    | split along tensor dim ``d``        | split along ``d``                 |
| ``Partial()``   | the sum over ranks is the value     | the same on every rank            |
| ``Replicated()``| the same on every rank              | the sum over ranks is the gradient|
| ``Invariant()`` | the same on every rank              | the same on every rank            |

``Replicated`` and ``Invariant`` hold the same numbers and differ in the gradient only; mixing them up is the
classic silent error of hand-written tensor parallelism, which is why they are two types here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

import sympy

zigzag = sympy.Function("zigzag")
"""``zigzag(k)`` as ``Shard.parts``: the dim is ``k`` sequences, each of them split in zigzag order (:class:`hgc.ir.ops.layout.Zigzag`)."""


def zigzag_runs(parts: object) -> sympy.Expr | None:
    """The ``k`` of ``zigzag(k)``; None for other parts."""
    return parts.args[0] if isinstance(parts, sympy.Expr) and parts.func == zigzag else None


@dataclass(frozen=True)
class Shard:
    """Split along tensor dim ``dim``.

    ``parts`` describes a *strided* shard, where the dim is a concatenation of parts and every rank holds its
    slice of each part: an integer or expression counts equal parts (a flattened ``[B, S]`` whose ``S`` is sharded, a fused
    ``[q; k; v]`` weight), a tuple lists unequal part sizes (grouped-query ``q``, ``k``, ``v``). ``parts=1`` is the plain shard,
    ``parts=zigzag(1)`` the order of causal ring attention: each rank holds one early and one late chunk of the dim.
    """

    dim: int
    parts: int | sympy.Expr | tuple[int, ...] = 1

    @property
    def is_plain(self) -> bool:
        return self.parts == 1

    def __str__(self) -> str:
        if self.is_plain:
            return f"S({self.dim})"
        if self.parts == zigzag(1):
            return f"S({self.dim},zigzag)"
        parts = "+".join(map(str, self.parts)) if isinstance(self.parts, tuple) else self.parts
        return f"S({self.dim},{parts})"


@dataclass(frozen=True)
class Partial:
    """Every rank holds a summand of the value."""

    def __str__(self) -> str:
        return "P"


@dataclass(frozen=True)
class Replicated:
    """The same value everywhere, gradients that must still be summed."""

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True)
class Invariant:
    """The same value and the same gradient everywhere."""

    def __str__(self) -> str:
        return "I"


Placement: TypeAlias = Shard | Partial | Replicated | Invariant

_SHARD = re.compile(r"S\((\d+)(?:,(.+))?\)")


def parse_placement(text: str) -> Placement:
    """Inverse of ``str(placement)``; raises ``ValueError`` naming the text."""
    simple: dict[str, Placement] = {"P": Partial(), "R": Replicated(), "I": Invariant()}
    if text in simple:
        return simple[text]
    match = _SHARD.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not a placement; expected S(d), S(d,parts), P, R or I")
    dim, parts = int(match[1]), match[2]
    if parts is None:
        return Shard(dim)
    if parts == "zigzag":
        return Shard(dim, zigzag(1))
    if "+" in parts:
        return Shard(dim, tuple(int(p) for p in parts.split("+")))
    return Shard(dim, int(parts) if parts.isdigit() else sympy.sympify(parts))


def is_whole(placement: Placement) -> bool:
    """True if every rank holds the full value."""
    return isinstance(placement, Replicated | Invariant)

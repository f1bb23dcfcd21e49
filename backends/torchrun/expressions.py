"""Python expressions as text with the binding strength that decides about parentheses, and literals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch

from hgc.backends.torchrun.names import quote
from hgc.errors import ArtifactError


class Binding(IntEnum):
    """How strongly an expression holds together, as in Python's table of operator precedence."""

    COMPARE = 1
    OR = 2
    XOR = 3
    AND = 4
    SHIFT = 5
    SUM = 6
    PRODUCT = 7
    UNARY = 8
    POWER = 9
    ATOM = 10


@dataclass(frozen=True)
class Expression:
    """Source text and its binding strength."""

    text: str
    binding: Binding = Binding.ATOM

    def within(self, binding: Binding) -> str:
        """The text as an operand of something that binds with ``binding``."""
        return self.text if self.binding >= binding else f"({self.text})"

    @property
    def atom(self) -> str:
        return self.within(Binding.ATOM)


def binary(left: Expression, symbol: str, right: Expression, binding: Binding) -> Expression:
    """``left symbol right``; left-associative, comparisons do not chain."""
    first = left.within(Binding(binding + 1) if binding == Binding.COMPARE else binding)
    return Expression(f"{first} {symbol} {right.within(Binding(binding + 1))}", binding)


def call(function: str, arguments: Iterable[str]) -> Expression:
    return Expression(f"{function}({', '.join(arguments)})")


def sequence(items: Iterable[str], brackets: str = "()") -> str:
    """A tuple or list display."""
    listed = list(items)
    comma = "," if brackets == "()" and len(listed) == 1 else ""
    return f"{brackets[0]}{', '.join(listed)}{comma}{brackets[1]}"


def number(value: float) -> Expression:
    """A literal that evaluates to exactly ``value``; the ends of a dtype's range are named."""
    if isinstance(value, float) and not math.isfinite(value):
        return Expression(f'float("{value}")')
    named = _LIMITS.get(value) if isinstance(value, float) else None
    if named is not None:
        return Expression(named)
    text = repr(value)
    return Expression(text, Binding.UNARY if text.startswith("-") else Binding.ATOM)


_LIMITS = {
    getattr(torch.finfo(d), end): f"torch.finfo({d}).{end}"
    for d in (torch.float64, torch.bfloat16, torch.float16, torch.float32)
    for end in ("min", "max")
}


def literal(value: Any) -> Expression:
    """Source for a constant argument of an operator; raises :class:`~hgc.errors.ArtifactError` for what has no source form."""
    if value is None or isinstance(value, bool):
        return Expression(repr(value))
    if type(value) in (int, float):
        return number(value)
    if isinstance(value, str):
        return Expression(quote(value))
    if isinstance(value, complex):
        return Expression(f"complex({number(value.real).text}, {number(value.imag).text})")
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return Expression(str(value))
    raise ArtifactError(
        f"{value!r} of type {type(value).__name__} is an argument of an operator and has no source form; keep it out of the traced code"
    )

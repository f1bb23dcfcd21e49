"""Every name, string and comment of an emitted program passes through here, so that no model or plan can break or inject source.

Names come from users' models (module and parameter names may be any text), so: identifiers are made by :class:`Scope`, strings by
:func:`quote`, comments and docstrings by :func:`comment`.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Iterable

MODULE_NAMES = frozenset({"F", "Model", "PLAN", "Tensor", "math", "ops", "rt", "self", "torch"})
"""Names that an emitted file gives to something of its own."""

_BUILTINS = frozenset(dir(builtins)) - {"input"}
_TAKEN = frozenset(keyword.kwlist) | frozenset(keyword.softkwlist) | _BUILTINS | MODULE_NAMES
_LONGEST = 40


def identifier(text: str, otherwise: str = "value") -> str:
    """The nearest ASCII identifier that is no keyword, builtin or name of the emitted module; ``otherwise`` if nothing is left of ``text``.

    It never starts or ends with an underscore, except where one is appended to a taken word (``class`` becomes ``class_``).
    """
    word = re.sub(r"[^0-9A-Za-z_]+", "_", text)
    word = re.sub(r"__+", "_", word).strip("_")[:_LONGEST].rstrip("_")
    if not word:
        word = otherwise
    if word[0].isdigit():
        word = f"{otherwise}_{word}"
    return f"{word}_" if word in _TAKEN else word


class Scope:
    """Hands out identifiers, each to one holder at a time."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._held = set(taken)

    def take(self, text: str, otherwise: str = "value") -> str:
        """A free identifier near ``text``; a number is appended if the nearest is held."""
        base = identifier(text, otherwise)
        name, count = base, 2
        while name in self._held:
            name = f"{base}_{count}" if base[-1].isdigit() else f"{base}{count}"
            count += 1
        self._held.add(name)
        return name

    def is_free(self, name: str) -> bool:
        return name not in self._held

    def hold(self, name: str) -> None:
        """Keep a name that was handed out before."""
        self._held.add(name)

    def release(self, name: str) -> None:
        """Let another holder have the name."""
        self._held.discard(name)


def quote(text: str) -> str:
    """A string literal, in double quotes where that needs no escape."""
    literal = repr(text)
    plain = literal[0] == "'" and literal[1:-1] == text and '"' not in text
    return f'"{text}"' if plain else literal


def comment(text: str) -> str:
    """Text that stays inside a comment or a docstring: one line, printable, no quotes that end a docstring, no backslash."""
    one_line = "".join(c if c.isprintable() else "?" for c in text)
    return one_line.replace("\\", "?").replace('"', "'")


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())

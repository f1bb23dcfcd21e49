"""Lines of source: wrapped like black does, with trailing comments in a column."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

WIDTH = 140
_COLUMN = 92
"""Comments start no further right than this, except behind longer code."""
_INDENT = "    "
_OPEN, _CLOSE = "([{", ")]}"


@dataclass(frozen=True)
class Line:
    """One statement and the comment behind it."""

    code: str
    comment: str = ""


def indent(lines: Iterable[str], levels: int = 1) -> list[str]:
    return [_INDENT * levels + line if line else line for line in lines]


def aligned(lines: Sequence[Line], room: int) -> list[str]:
    """Text of at most ``room`` characters a line; comments in one column, behind the closing bracket where the line would be too long."""
    lengths = [len(line.code) for line in lines if line.comment and len(line.code) <= _COLUMN]
    column = max(lengths, default=0)
    text: list[str] = []
    for line in lines:
        if not line.comment:
            text.extend(wrapped(line.code, room))
        elif max(len(line.code), column) + 4 + len(line.comment) <= room:
            text.append(f"{line.code:<{column}}  # {line.comment}")
        else:
            text += _commented(line, room)
    return text


def _commented(line: Line, room: int) -> list[str]:
    """A long statement with its comment behind the closing bracket, or above it."""
    if len(line.code) + 2 + len(line.comment) + 2 <= room:
        return [f"{line.code}  # {line.comment}"]
    lines = wrapped(line.code, min(room, len(line.code) - 1))
    if len(lines) == 1:
        return [f"# {line.comment}", *lines]
    return [*lines[:-1], f"{lines[-1]}  # {line.comment}"]


def wrapped(code: str, room: int) -> list[str]:
    """One line if it fits, else split at the last bracket, else one item a line."""
    if len(code) <= room or not code:
        return [code]
    start = _last_bracket(code)
    if start is None:
        return [code]
    head, body, tail = code[: start + 1], code[start + 1 : -1], code[-1]
    items = list(split_items(body))
    if len(_INDENT + body) <= room or not _takes_comma(head, items):
        return [head, _INDENT + body, tail]
    lines = [head]
    for item in items:
        lines += indent(_with_comma(wrapped(item, room - len(_INDENT) - 1)))
    return [*lines, tail]


def _takes_comma(head: str, items: Sequence[str]) -> bool:
    """A comma behind the last item changes nothing in calls and displays; it would in ``(a + b)`` and ``x[i]``."""
    follows_name = head[-2:-1].isalnum() or head[-2:-1] in ("_", ")", "]")
    if head[-1] == "(":
        return follows_name or len(items) > 1
    return not follows_name


def _with_comma(lines: list[str]) -> list[str]:
    return [*lines[:-1], lines[-1] + ","]


def _last_bracket(code: str) -> int | None:
    """Where the bracket opens that the code's last character closes."""
    if code[-1] not in _CLOSE:
        return None
    stack = [(i, c) for i, c in _outside_strings(code) if c in _OPEN + _CLOSE]
    depth = 0
    for position, character in reversed(stack):
        depth += 1 if character in _CLOSE else -1
        if depth == 0:
            return position
    return None


def split_items(body: str) -> Iterator[str]:
    """The text between top-level commas."""
    depth, start = 0, 0
    for position, character in _outside_strings(body):
        depth += (character in _OPEN) - (character in _CLOSE)
        if character == "," and depth == 0:
            yield body[start:position].strip()
            start = position + 1
    if body[start:].strip():
        yield body[start:].strip()


def _outside_strings(code: str) -> Iterator[tuple[int, str]]:
    quote, escaped = "", False
    for position, character in enumerate(code):
        if quote:
            if escaped:
                escaped = False
            elif character == "\\":
                escaped = True
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        else:
            yield position, character

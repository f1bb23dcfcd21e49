"""Find what repeats in a sequence of calls, so that the text does not grow with the depth of the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import fx

from hgc.backends.torchrun.root import Call

_LONGEST_PERIOD = 32

Slot = tuple[int, int]
"""A result of a call in the loop's body: position of the call, position of the result."""


@dataclass(frozen=True)
class Loop:
    """``count`` repetitions of ``body`` (the calls of the first one).

    ``steps`` is by how much each call's index grows. ``carried`` maps ``(call, argument)`` positions to the slot of the
    previous repetition that flows in there; all other arguments come from the same repetition or are the same in all. ``last`` are
    the calls of the last repetition, whose results outlive the loop.
    """

    body: tuple[Call, ...]
    count: int
    steps: tuple[int, ...]
    carried: dict[tuple[int, int], Slot]
    last: tuple[Call, ...]


def find_loops(calls: Sequence[Call]) -> list[Call | Loop]:
    """Calls in order, runs that repeat replaced by loops."""
    found: list[Call | Loop] = []
    position = 0
    while position < len(calls):
        loop = _best(calls, position)
        if loop is None:
            found.append(calls[position])
            position += 1
        else:
            found.append(loop)
            position += loop.count * len(loop.body)
    return found


def _best(calls: Sequence[Call], start: int) -> Loop | None:
    """The loop from ``start`` on that saves most lines."""
    best, saved = None, 0
    for period in range(1, min(_LONGEST_PERIOD, (len(calls) - start) // 2) + 1):
        loop = _repeat(calls, start, period)
        gain = loop.count * period - period - 1 if loop is not None else 0
        if gain > saved:
            best, saved = loop, gain
    return best


def _repeat(calls: Sequence[Call], start: int, period: int) -> Loop | None:
    """The longest loop with the given period."""
    rounds = [tuple(calls[i : i + period]) for i in range(start, len(calls) - period + 1, period)]
    first, second = rounds[0], rounds[1]
    steps = tuple(_step(a, b) for a, b in zip(first, second, strict=True))
    if any(step is None for step in steps):
        return None
    carried = _carried(first, second)
    if carried is None:
        return None
    count = 1
    while count < len(rounds) and _continues(rounds, count, steps, carried) and not _escapes(rounds, count - 1):
        count += 1
    if count < 2:
        return None
    return Loop(first, count, tuple(s or 0 for s in steps), carried, rounds[count - 1])


def _step(a: Call, b: Call) -> int | None:
    """How the index grows between two calls of one attribute."""
    if a.group is not b.group or len(a.arguments) != len(b.arguments) or len(a.results) != len(b.results) or a.recompute != b.recompute:
        return None
    if a.index is None or b.index is None:
        return 0 if a.index is b.index else None
    return b.index - a.index


def _carried(first: Sequence[Call], second: Sequence[Call]) -> dict[tuple[int, int], Slot] | None:
    """Which arguments of the second round are results of the first; ``None`` if some argument follows no pattern."""
    slots = {node: slot for slot, node in _results(first).items()}
    inner = {node: slot for slot, node in _results(second).items()}
    carried: dict[tuple[int, int], Slot] = {}
    for position, (a, b) in enumerate(zip(first, second, strict=True)):
        for index, (x, y) in enumerate(zip(a.arguments, b.arguments, strict=True)):
            if y in inner or x in slots:
                if inner.get(y) != slots.get(x):
                    return None
            elif y in slots:
                carried[position, index] = slots[y]
            elif x is not y:
                return None
    return carried


def _continues(rounds: Sequence[Sequence[Call]], number: int, steps: Sequence[int | None], carried: dict[tuple[int, int], Slot]) -> bool:
    """Does round ``number`` follow from the one before it as the second from the first?"""
    before, now = rounds[number - 1], rounds[number]
    if tuple(_step(a, b) for a, b in zip(before, now, strict=True)) != tuple(steps):
        return False
    previous, inner = _results(before), {node: slot for slot, node in _results(now).items()}
    slots = {node: slot for slot, node in _results(rounds[0]).items()}
    for position, (a, b) in enumerate(zip(rounds[0], now, strict=True)):
        for index, (x, y) in enumerate(zip(a.arguments, b.arguments, strict=True)):
            if (position, index) in carried:
                if previous.get(carried[position, index]) is not y:
                    return False
            elif x in slots or y in inner:
                if slots.get(x) != inner.get(y):
                    return False
            elif x is not y:
                return False
    return True


def _escapes(rounds: Sequence[Sequence[Call]], number: int) -> bool:
    """Is a result of this round used elsewhere than in it and the next?"""
    near = {call.block.node for call in [*rounds[number], *rounds[number + 1]]}
    return any(user not in near for node in _results(rounds[number]).values() for user in node.users)


def _results(calls: Sequence[Call]) -> dict[Slot, fx.Node]:
    return {(i, j): node for i, call in enumerate(calls) for j, node in enumerate(call.results) if node is not None}

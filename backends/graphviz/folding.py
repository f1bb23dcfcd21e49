"""Find what repeats in a sequence of blocks: 80 equal layers are a run, "five local layers and a global one" many times a run of runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

LONGEST_UNIT = 16


@dataclass(frozen=True)
class Run:
    """``count`` repeats of ``unit`` in a row; ``unit`` holds the *first* repeat."""

    unit: tuple[Item, ...]
    count: int


Item: TypeAlias = int | Run
"""A position in the sequence, or a run of them."""

Joined: TypeAlias = Callable[[int, int], bool]


def fold(keys: Sequence[str], joined: Joined) -> tuple[Item, ...]:
    """Fold a sequence of keys into runs.

    ``joined(i, j)``: does position ``j`` use a result of position ``i``? Repeats are folded only if each uses results of the one
    before in the same way, so that equal towers side by side stay apart. Every position is covered exactly once, in order.
    """
    return _fold(keys, joined, 0, len(keys))


def _fold(keys: Sequence[str], joined: Joined, start: int, stop: int) -> tuple[Item, ...]:
    items: list[Item] = []
    while start < stop:
        length, count = _best_run(keys, joined, start, stop)
        if count == 1:
            items.append(start)
        elif length == 1:
            items.append(Run((start,), count))
        else:
            items.append(Run(_fold(keys, joined, start, start + length), count))
        start += length * count
    return tuple(items)


def _best_run(keys: Sequence[str], joined: Joined, start: int, stop: int) -> tuple[int, int]:
    """Length of the unit and number of repeats that cover most, the shortest unit winning a tie."""
    best = (1, 1)
    for length in range(1, min(LONGEST_UNIT, (stop - start) // 2) + 1):
        count = _repeats(keys, joined, start, length, stop)
        if count > 1 and length * count > best[0] * best[1]:
            best = (length, count)
    return best


def _repeats(keys: Sequence[str], joined: Joined, start: int, length: int, stop: int) -> int:
    unit, inner = keys[start : start + length], _joints(joined, start, start, length)
    count, outer = 1, _joints(joined, start, start + length, length) if start + 2 * length <= stop else ()
    while any(outer) and start + (count + 1) * length <= stop:
        here = start + count * length
        same_unit = keys[here : here + length] == unit and _joints(joined, here, here, length) == inner
        if not same_unit or _joints(joined, here - length, here, length) != outer:
            break
        count += 1
    return count


def _joints(joined: Joined, before: int, here: int, length: int) -> tuple[bool, ...]:
    """Which positions of the unit at ``here`` use which positions of the unit at ``before``."""
    return tuple(joined(i, j) for i in range(before, before + length) for j in range(here, here + length))


def leaves(item: Item) -> list[tuple[int, list[int]]]:
    """For each position of the first repeat: that position, and all the positions it stands for."""
    if isinstance(item, int):
        return [(item, [item])]
    inner = [leaf for part in item.unit for leaf in leaves(part)]
    size = sum(len(covered) for _, covered in inner)
    return [(first, [p + repeat * size for repeat in range(item.count) for p in covered]) for first, covered in inner]

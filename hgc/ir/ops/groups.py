"""Mesh axis name -> process group, one table per thread.

An operator looks its axis up when it runs forward and keeps what it found for backward, so that a rank that hosts two stages with
different ``tp`` groups never mixes them up, and ranks may be threads of one process.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Group:
    """A process group with what an operator asks of it; ``name`` is the key in torch's registry of groups."""

    name: str
    size: int
    rank: int
    handle: dist.ProcessGroup


ALONE = Group("", 1, 0, None)  # type: ignore[arg-type]
"""A group of one rank, which nobody talks to."""


class _Table(threading.local):
    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}


_table = _Table()


def describe(handle: dist.ProcessGroup) -> Group:
    """Look up name, size and own rank once, instead of at every call of an operator."""
    return Group(str(handle.group_name), dist.get_world_size(handle), dist.get_rank(handle), handle)


def set_groups(groups: Mapping[str, dist.ProcessGroup | Group]) -> None:
    """Replace this thread's table: mesh axis name -> process group."""
    _table.groups = {axis: found if isinstance(found, Group) else describe(found) for axis, found in groups.items()}


def current() -> dict[str, Group]:
    """This thread's table, as :func:`use` takes it."""
    return dict(_table.groups)


@contextmanager
def use(groups: Mapping[str, dist.ProcessGroup | Group]) -> Iterator[None]:
    """Set this thread's table for the duration of a ``with`` block."""
    before = _table.groups
    set_groups(groups)
    try:
        yield
    finally:
        _table.groups = before


def find(axis: str | None) -> Group | None:
    """The group of an axis with at least two ranks; ``None`` where the operator is its single-device self."""
    if axis is None:
        return None
    group = _table.groups.get(axis)
    return group if group is not None and group.size > 1 else None


def find_all(axes: tuple[str, ...]) -> tuple[Group, ...]:
    """The groups among ``axes`` that have at least two ranks."""
    return tuple(group for group in map(find, axes) if group is not None)


def axis_size(axis: str) -> int:
    """Number of ranks on a mesh axis, 1 if the axis is absent."""
    group = find(axis)
    return group.size if group else 1


def axis_rank(axis: str) -> int:
    """This rank's coordinate on a mesh axis, 0 if the axis is absent."""
    group = find(axis)
    return group.rank if group else 0


def is_distributed() -> bool:
    """True if any axis of the table has at least two ranks."""
    return any(group.size > 1 for group in _table.groups.values())

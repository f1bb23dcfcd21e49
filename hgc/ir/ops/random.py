"""Random numbers that differ along some mesh axes and agree along all others.

All ranks seed torch alike and draw alike, so the default CPU generator is in step on all ranks. Code that needs numbers of its own on each
rank draws *one* number from it, mixes in the rank's coordinates on the axes concerned, and seeds a stream with the result. No
stream has a state of its own: restoring the default generator (activation checkpointing, a resumed run) restores everything.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from hgc.ir.ops import groups, keyed


class _Root(threading.local):
    """The generator that is in step on all ranks: torch's own, unless ranks are threads that share it."""

    def __init__(self) -> None:
        self.generator: torch.Generator | None = None


_root = _Root()
_default_generators = threading.RLock()  # they belong to the process, ranks that are threads take turns


def manual_seed(seed: int) -> None:
    """Seed all random numbers of this rank; every rank must pass the same ``seed``."""
    if _root.generator is not None:
        _root.generator.manual_seed(seed)
    else:
        torch.manual_seed(seed)


@contextmanager
def own_root(seed: int) -> Iterator[None]:
    """Give this thread a root generator of its own, for ranks that are threads of one process."""
    before = _root.generator
    _root.generator = torch.Generator().manual_seed(seed)
    try:
        yield
    finally:
        _root.generator = before


def next_seed(axes: tuple[str, ...]) -> int:
    """A number that differs along ``axes`` and agrees along every other mesh axis; takes one draw of the root generator."""
    drawn = int(torch.randint(2**62, (), generator=_root.generator))
    text = f"{drawn}|" + ",".join(f"{axis}={groups.axis_rank(axis)}" for axis in sorted(axes))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@contextmanager
def random_axes(axes: tuple[str, ...]) -> Iterator[None]:
    """Inside, torch's default generators give numbers that differ along ``axes`` and agree along every other mesh axis.

    Outside they continue one draw later than before. If no axis has two ranks the default generators are left alone.
    """
    if not groups.find_all(axes):
        yield
        return
    with seeded(next_seed(axes)):
        yield


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Inside, torch's default generators give the numbers of ``seed``; outside they go on as if nothing had been drawn."""
    with _default_generators:
        generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        before = [generator.get_state() for generator in generators]
        try:
            for generator in generators:
                generator.manual_seed(seed)
            yield
        finally:
            for generator, state in zip(generators, before, strict=True):
                generator.set_state(state)


def derived_seed(seed: int, *numbers: int) -> int:
    """A seed for each combination of ``numbers``."""
    text = f"{seed}|" + ",".join(map(str, numbers))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


@contextmanager
def stream(seed: int) -> Iterator[None]:
    """Inside, all random numbers of this rank follow from ``seed``; outside they go on as if nothing had been drawn."""
    if _root.generator is None:
        with seeded(seed):
            yield
        return
    before = _root.generator.get_state()
    try:
        _root.generator.manual_seed(seed)
        yield
    finally:
        _root.generator.set_state(before)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _dropout_along(x: Tensor, p: float, axes: tuple[str, ...]) -> Tensor:
    with random_axes(axes):
        return F.dropout(x, p, training=True)


def dropout(x: Tensor, p: float, random_axes: tuple[str, ...] = (), *, where: tuple[keyed.Cut, ...] | None = None) -> Tensor:
    """``F.dropout`` in training, with masks that differ along ``random_axes`` and agree along every other mesh axis.

    ``where``: how ``x`` is cut; then the masks are those of one device (:mod:`hgc.ir.ops.keyed`), whatever the axes.
    """
    if p and where is not None:
        return keyed.dropped(x, p, next_seed(()), where)
    if p and groups.find_all(random_axes):
        masked: Tensor = _dropout_along(x, p, random_axes)
        return masked
    return F.dropout(x, p, training=True)  # without random numbers for p = 0


def has_own_root() -> bool:
    """Does this thread draw from a generator of its own (:func:`own_root`), not from torch's?"""
    return _root.generator is not None


def get_state() -> Tensor:
    """The state that all random numbers of a run follow from, alike on all ranks; a ``uint8`` vector."""
    state: Tensor = (_root.generator or torch.default_generator).get_state()
    return state


def set_state(state: Tensor) -> None:
    """Continue where :func:`get_state` was taken."""
    (_root.generator or torch.default_generator).set_state(state)

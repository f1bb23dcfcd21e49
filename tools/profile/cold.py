"""Calls as a training step makes them: on operands that no cache holds any more, with results that live on for a while."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

COLD_BYTES, MOST_SETS = 2**26, 64
"""Operands take turns: sets of so many bytes altogether, and at most so many."""


def sets(device: torch.device, bytes_: int) -> range:
    """One for each set of operands of ``bytes_``. A GPU's kernels find little in caches either way, one set serves there."""
    return range(max(2, min(MOST_SETS, COLD_BYTES // bytes_)) if device.type == "cpu" else 1)


def in_turn(calls: Sequence[Callable[[], Tensor]]) -> Callable[[], None]:
    """One call after the other, round and round; each result lives until its next turn, as activations live until their backward."""
    kept: list[Tensor | None] = [None] * len(calls)
    turn = itertools.cycle(range(len(calls)))

    def call() -> None:
        index = next(turn)
        kept[index] = calls[index]()

    return call

"""Reference solvers: every choice, and Galvatron's dynamic programme over block, memory and strategy."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from hgc.errors import PlanError
from hgc.passes.sharding.search.problem import Chain, Solution, capped, caps, solution

_MOST_CHOICES = 1_000_000


def brute_force(chain: Chain) -> Solution | None:
    """The best of all choices, ``None`` if nothing fits. Raises :class:`PlanError` for more than a million choices."""
    count = chain.strategies**chain.blocks
    if count > _MOST_CHOICES:
        raise PlanError(f"brute force would try {count:.3g} choices; use solve_exact for more than {_MOST_CHOICES}")
    choices = np.indices((chain.strategies,) * chain.blocks).reshape(chain.blocks, -1)
    rows = np.arange(chain.blocks)[:, None]
    time_s = chain.time_s[rows, choices].sum(axis=0) + chain.switch_s[rows[:-1], choices[:-1], choices[1:]].sum(axis=0)
    memory = chain.memory[rows, choices].sum(axis=0) + chain.passing[rows, choices].max(axis=0)
    time_s = np.where(memory <= chain.limit, time_s, np.inf)
    best = int(time_s.argmin())
    return solution(chain, choices[:, best].tolist(), float(time_s[best])) if np.isfinite(time_s[best]) else None


def solve_exact(chain: Chain, unit: float = 1.0) -> Solution | None:
    """The best choice by the dynamic programme of Galvatron (section 3.3 of the VLDB'23 paper) with the previous strategy in its state.

    ``f[e, s] = time[s] + min over s' of (f[e - memory[s], s'] + switch[s', s])``, memory in steps of ``unit`` and rounded up, so that
    the result is exact where all memories are multiples of it and feasible always. ``None`` if nothing fits. Work and memory:
    ``blocks * limit / unit * strategies ** 2``, for each distinct value of ``passing``.
    """
    found = [found for cap in caps(chain) if (found := _programme(capped(chain, cap), unit)) is not None]
    if not found:
        return None
    best = min(found, key=chain.time_of)
    return solution(chain, best, chain.time_of(best))


def _programme(chain: Chain, unit: float) -> list[int] | None:
    steps = math.floor(chain.limit / unit + 1e-9)
    if steps < 0:
        return None
    needs = np.ceil(np.minimum(chain.memory, chain.limit + unit) / unit - 1e-9).astype(int)
    best = np.full((steps + 1, chain.strategies), np.inf)
    for strategy in range(chain.strategies):
        best[needs[0, strategy] :, strategy] = chain.time_s[0, strategy]
    back: list[NDArray[np.int16]] = []
    for block in range(1, chain.blocks):
        after, chosen = np.full_like(best, np.inf), np.zeros(best.shape, dtype=np.int16)
        for strategy in range(chain.strategies):
            need = needs[block, strategy]
            if need <= steps and np.isfinite(chain.time_s[block, strategy]):
                reached = best[: steps + 1 - need] + chain.switch_s[block - 1, :, strategy]
                chosen[need:, strategy] = reached.argmin(axis=1)
                after[need:, strategy] = reached.min(axis=1) + chain.time_s[block, strategy]
        best = after
        back.append(chosen)
    if not np.isfinite(best[steps]).any():
        return None
    return _walk_back(back, needs, steps, int(best[steps].argmin()))


def _walk_back(back: list[NDArray[np.int16]], needs: NDArray[np.int_], steps: int, last: int) -> list[int]:
    choices, left = [last], steps
    for block in range(len(back), 0, -1):
        previous = int(back[block - 1][left, choices[-1]])
        left -= int(needs[block, choices[-1]])
        choices.append(previous)
    return choices[::-1]

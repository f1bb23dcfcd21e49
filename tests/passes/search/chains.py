"""Random problems for the solvers."""

from __future__ import annotations

import numpy as np

from hgc.passes.sharding.search.problem import Chain


def random_chain(seed: int) -> Chain:
    """Up to six blocks and four strategies; whole memories; some lack strategies, some have ``passing``, some limits are too tight."""
    draw = np.random.default_rng(seed)
    blocks, strategies = int(draw.integers(1, 7)), int(draw.integers(1, 5))
    shape = blocks, strategies
    time_s = draw.uniform(1, 10, shape)
    if draw.random() < 0.3:
        time_s[draw.random(shape) < 0.2] = np.inf
    memory = draw.integers(0, 20, shape).astype(float)
    if draw.random() < 0.5:  # blocks alike, as layers are
        time_s[:], memory[:] = time_s[0], memory[0]
    switch_s = draw.uniform(0, 4, (max(blocks - 1, 0), strategies, strategies)) * draw.integers(0, 2)
    switch_s = np.where(np.eye(strategies, dtype=bool), 0.0, switch_s)
    passing = draw.integers(0, 8, shape).astype(float) if draw.random() < 0.5 else np.zeros((0, 0))
    lightest, heaviest = memory.min(axis=1).sum(), memory.max(axis=1).sum()
    limit = float(np.round(draw.uniform(lightest * 0.9, heaviest + 4)))
    return Chain(time_s, memory, switch_s, limit, passing)

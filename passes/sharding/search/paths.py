"""Shortest paths through (block, strategy) at a price of memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgc.passes.sharding.search.problem import Chain, Numbers


@dataclass(frozen=True, eq=False)
class Path:
    """A strategy (index) for each block of a chain without ``passing``."""

    choices: NDArray[np.int_]
    time_s: float
    memory: float

    @staticmethod
    def of(chain: Chain, choices: NDArray[np.int_]) -> Path:
        return Path(choices, chain.time_of(choices.tolist()), float(chain.memory[np.arange(chain.blocks), choices].sum()))


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices tried, the paths that they gave, the best of these that fits, and the lower bound that the prices prove."""

    prices: tuple[float, ...]
    paths: tuple[Path, ...]
    best: Path | None
    bound_s: float


@dataclass(frozen=True, eq=False)
class ToGo:
    """From each block and strategy to the end, that block left out: the length at a price, and time and memory of that path.

    ``after``: [blocks - 1, strategies], the next block's strategy on it.
    """

    length: Numbers
    time_s: Numbers
    memory: Numbers
    after: NDArray[np.int_]


def shortest(chain: Chain, price: float, weights: Numbers | None = None) -> Path | None:
    """The path with the least ``time + price * memory``, or with the least sum of ``weights``; ``None`` if a block has no strategy."""
    if weights is None:
        costs, switch_s = chain.time_s + price * chain.memory, chain.switch_s
    else:
        costs, switch_s = np.where(np.isfinite(chain.time_s), weights, np.inf), np.zeros_like(chain.switch_s)
    length = costs[0]
    columns = np.arange(chain.strategies)
    back = np.empty((max(chain.blocks - 1, 0), chain.strategies), dtype=int)
    for block in range(1, chain.blocks):
        reached = length[:, None] + switch_s[block - 1]
        back[block - 1] = reached.argmin(axis=0)
        length = reached[back[block - 1], columns] + costs[block]
    if not np.isfinite(length).any():
        return None
    choices = [int(length.argmin())]
    for row in back[::-1]:
        choices.append(int(row[choices[-1]]))
    return Path.of(chain, np.array(choices[::-1]))


def to_go(chain: Chain, price: float) -> ToGo:
    """Least ``time + price * memory`` of what follows each (block, strategy), the switch to it included."""
    shape = chain.time_s.shape
    length, time_s, memory = np.zeros(shape), np.zeros(shape), np.zeros(shape)
    after = np.zeros((max(chain.blocks - 1, 0), chain.strategies), dtype=int)
    rows = np.arange(chain.strategies)
    for block in range(chain.blocks - 2, -1, -1):
        nexts = length[block + 1] + chain.time_s[block + 1] + price * chain.memory[block + 1]
        reached = chain.switch_s[block] + nexts[None, :]
        chosen = reached.argmin(axis=1)
        after[block], length[block] = chosen, reached[rows, chosen]
        time_s[block] = chain.switch_s[block][rows, chosen] + chain.time_s[block + 1][chosen] + time_s[block + 1][chosen]
        memory[block] = chain.memory[block + 1][chosen] + memory[block + 1][chosen]
    return ToGo(length, time_s, memory, after)


def least_memory(chain: Chain) -> Numbers:
    """[blocks]: memory that the blocks behind each one take at least."""
    least = np.where(np.isfinite(chain.time_s), chain.memory, np.inf).min(axis=1)
    return np.append(least[::-1].cumsum()[::-1][1:], 0.0)

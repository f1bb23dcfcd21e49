"""Closing the gap between a choice and its bound: labels (time, memory) for each block and strategy, dropped as soon as they cannot win."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgc.passes.sharding.search.paths import Path, Prices, ToGo, least_memory, to_go
from hgc.passes.sharding.search.problem import Chain, Numbers

_PRICES = 6
"""Bounds at so many prices around the best one; each prunes what the others let through."""


@dataclass(frozen=True, eq=False)
class _Labels:
    """Of one block: strategy, time and memory so far, and the label of the block before."""

    strategy: NDArray[np.int_]
    time_s: Numbers
    memory: Numbers
    parent: NDArray[np.int_]

    def keep(self, chosen: NDArray[np.int_] | NDArray[np.bool_]) -> _Labels:
        return _Labels(self.strategy[chosen], self.time_s[chosen], self.memory[chosen], self.parent[chosen])

    @property
    def count(self) -> int:
        return len(self.strategy)


@dataclass(frozen=True, eq=False)
class _Completion:
    """A whole choice: the label ``parent`` of the block before ``block``, ``strategy`` for this one, then along the path of one price."""

    time_s: float
    block: int
    strategy: int
    parent: int
    rest: ToGo


def close_gap(chain: Chain, best: Path, found: Prices, below_s: float, tolerance: float, most_labels: int) -> tuple[Path, float]:
    """The best choice within ``tolerance`` and a lower bound; see :func:`hgc.passes.sharding.search.solve.solve`."""
    rests = [to_go(chain, price) for price in _spread(found.prices)]
    bounds = list(zip(_spread(found.prices), rests, strict=True))
    least = least_memory(chain)
    levels: list[_Labels] = []
    completion: _Completion | None = None
    dropped_s = math.inf
    labels = _first(chain)
    for block in range(chain.blocks):
        labels = labels if block == 0 else _extend(chain, levels[-1], block)
        labels = labels.keep(labels.memory + least[block] <= chain.limit)
        completion = _completed(chain, labels, block, rests, completion)
        target_s = min(best.time_s, below_s, completion.time_s if completion else math.inf)
        lower_s = _lower(chain, labels, block, bounds)
        alive = lower_s < target_s * (1 - tolerance) - 1e-12 * abs(target_s)
        dropped_s = min(dropped_s, float(lower_s[~alive].min(initial=math.inf)))
        labels, lower_s = labels.keep(alive), lower_s[alive]
        kept = _undominated(labels)
        labels, lower_s = labels.keep(kept), lower_s[kept]
        if labels.count > most_labels:
            order = np.argsort(lower_s, kind="stable")
            dropped_s = min(dropped_s, float(lower_s[order[most_labels]]))
            labels = labels.keep(order[:most_labels])
        levels.append(labels)
        if not labels.count:
            break
    if completion is not None and completion.time_s < best.time_s:
        best = _path(chain, levels, completion)
    return best, max(found.bound_s, min(best.time_s, dropped_s))


def _spread(prices: tuple[float, ...]) -> list[float]:
    """The last prices, which are the nearest to the best, and some beside it."""
    last = prices[-1]
    near = [last, *prices[-3:-1], last * 0.7, last * 1.4, 0.0]
    return list(dict.fromkeys(near))[:_PRICES]


def _first(chain: Chain) -> _Labels:
    usable = np.flatnonzero(np.isfinite(chain.time_s[0]))
    return _Labels(usable, chain.time_s[0, usable], chain.memory[0, usable], np.full(len(usable), -1))


def _extend(chain: Chain, before: _Labels, block: int) -> _Labels:
    usable = np.flatnonzero(np.isfinite(chain.time_s[block]))
    time_s = before.time_s[:, None] + chain.switch_s[block - 1][before.strategy][:, usable] + chain.time_s[block, usable]
    memory = before.memory[:, None] + chain.memory[block, usable]
    parent = np.broadcast_to(np.arange(before.count)[:, None], time_s.shape)
    strategy = np.broadcast_to(usable, time_s.shape)
    return _Labels(strategy.ravel(), time_s.ravel(), memory.ravel(), parent.ravel())


def _lower(chain: Chain, labels: _Labels, block: int, bounds: list[tuple[float, ToGo]]) -> Numbers:
    """What no choice that begins so can undercut."""
    lower_s = np.full(labels.count, -math.inf)
    for price, rest in bounds:
        lower_s = np.maximum(lower_s, labels.time_s + price * (labels.memory - chain.limit) + rest.length[block, labels.strategy])
    return lower_s


def _undominated(labels: _Labels) -> NDArray[np.int_]:
    """Positions of the labels than which no other of the same strategy is both faster and smaller; of equals the first."""
    order = np.lexsort((labels.time_s, labels.memory, labels.strategy))
    strategy, time_s = labels.strategy[order], labels.time_s[order]
    borders = np.concatenate([[0], np.flatnonzero(strategy[1:] != strategy[:-1]) + 1, [len(order)]])
    kept = np.ones(len(order), dtype=bool)
    for start, end in itertools.pairwise(borders):
        part = time_s[start:end]
        fastest = np.minimum.accumulate(part)
        kept[start + 1 : end] = part[1:] < fastest[:-1] * (1 - 1e-13)
    chosen: NDArray[np.int_] = order[kept]
    return chosen


def _completed(chain: Chain, labels: _Labels, block: int, rests: list[ToGo], best: _Completion | None) -> _Completion | None:
    """The best way on from any label of this block, if it is better than the best so far."""
    for rest in rests:
        time_s = labels.time_s + rest.time_s[block, labels.strategy]
        time_s = np.where(labels.memory + rest.memory[block, labels.strategy] <= chain.limit, time_s, np.inf)
        if time_s.size and time_s.min() < (best.time_s if best else math.inf):
            at = int(time_s.argmin())
            best = _Completion(float(time_s[at]), block, int(labels.strategy[at]), int(labels.parent[at]), rest)
    return best


def _path(chain: Chain, levels: list[_Labels], completion: _Completion) -> Path:
    front, label = [completion.strategy], completion.parent
    for level in levels[completion.block - 1 :: -1] if completion.block else []:
        front.append(int(level.strategy[label]))
        label = int(level.parent[label])
    choices = front[::-1]
    for block in range(completion.block, chain.blocks - 1):
        choices.append(int(completion.rest.after[block, choices[-1]]))
    return Path.of(chain, np.array(choices))

"""The production solver: a price on memory and shortest paths, then labels that only the bounds let live.

A price turns the memory limit into time: the shortest path through (block, strategy) with ``time + price * memory`` is found in
``blocks * strategies ** 2`` steps whatever the limit is, and ``its length - price * limit`` is a lower bound on every choice that fits
(Lagrangian relaxation). The best price comes from the line through the best path that fits and the best that does not (LARAC, Juttner et
al. 2001). What gap is left is closed by labels (time, memory) for each block and strategy, of which dominated ones and those that no
bound lets win are dropped.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hgc.passes.sharding.search.labels import close_gap
from hgc.passes.sharding.search.paths import Path, Prices, shortest
from hgc.passes.sharding.search.problem import Chain, Numbers, Solution, capped, caps, solution

TOLERANCE = 1e-3
MOST_LABELS = 20_000
_ROUNDS = 60


def solve(chain: Chain, tolerance: float = TOLERANCE, most_labels: int = MOST_LABELS, below_s: float = math.inf) -> Solution | None:
    """A choice and a lower bound on all that fit; ``None`` if none fits, or none is faster than ``below_s``.

    ``tolerance``: gap at which to stop, 0 to prove the best. ``most_labels``: how many labels a block may have; beyond it those with
    the highest bounds are dropped, which the lower bound accounts for.
    """
    best: Path | None = None
    bound_s = math.inf
    for cap in caps(chain):
        limit_s = min(below_s, best.time_s) if best else below_s
        found, lower_s = _solve_sum(capped(chain, cap), limit_s, tolerance, most_labels)
        bound_s = min(bound_s, lower_s)
        if found is not None and found.time_s < limit_s:
            best = found
    return solution(chain, best.choices.tolist(), bound_s) if best is not None else None


def price_bound(chain: Chain) -> float:
    """The Lagrangian lower bound alone; infinite if nothing fits."""
    return min((_search(capped(chain, cap)).bound_s for cap in caps(chain)), default=math.inf)


def _solve_sum(chain: Chain, below_s: float, tolerance: float, most_labels: int) -> tuple[Path | None, float]:
    """The best choice of a chain without ``passing``, and a lower bound (on those that fit and are faster than ``below_s``)."""
    found = _search(chain)
    if found.best is None or found.bound_s >= below_s:
        return None, found.bound_s
    best = spliced(chain, found)
    target_s = min(best.time_s, below_s)
    if found.bound_s >= target_s * (1 - tolerance):
        return best, found.bound_s
    return close_gap(chain, best, found, below_s, tolerance, most_labels)


@dataclass(frozen=True, eq=False)
class _Line:
    """Where the search for the price stands: a path that fits and one that does not."""

    fits: Path
    over: Path

    @property
    def price(self) -> float:
        return (self.fits.time_s - self.over.time_s) / (self.over.memory - self.fits.memory)


def _search(chain: Chain) -> Prices:
    """Prices from LARAC, the paths that they gave, the best that fits, and the bound."""
    lightest = shortest(chain, 0.0, chain.memory)
    if lightest is None or lightest.memory > chain.limit:
        return Prices((), (), None, math.inf)
    fastest = shortest(chain, 0.0)
    assert fastest is not None
    if fastest.memory <= chain.limit:
        return Prices((0.0,), (fastest,), fastest, fastest.time_s)
    line, paths, prices, bound_s = _Line(lightest, fastest), [lightest, fastest], [0.0], fastest.time_s
    for _ in range(_ROUNDS):
        price = line.price
        path = shortest(chain, price)
        assert path is not None
        length = path.time_s + price * path.memory
        bound_s = max(bound_s, length - price * chain.limit)
        prices.append(price)
        if length >= (line.fits.time_s + price * line.fits.memory) * (1 - 1e-12):
            break
        paths.append(path)
        line = _Line(path, line.over) if path.memory <= chain.limit else _Line(line.fits, path)
    best = min((path for path in paths if path.memory <= chain.limit), key=lambda path: path.time_s)
    return Prices(tuple(prices), tuple(paths), best, bound_s)


def spliced(chain: Chain, found: Prices) -> Path:
    """The best that fits among the paths found and all that begin as one of them and end as another."""
    assert found.best is not None
    best = found.best
    parts = [_parts(chain, path) for path in found.paths]
    for index, (front_s, front_memory) in enumerate(parts):
        for other, (back_s, back_memory) in enumerate(parts):
            first, second = found.paths[index].choices, found.paths[other].choices
            joints = chain.switch_s[np.arange(chain.blocks - 1), first[:-1], second[1:]]
            time_s = front_s[:-1] + joints + (back_s[-1] - back_s[:-1] - _switches(chain, second))
            memory = front_memory[:-1] + back_memory[-1] - back_memory[:-1]
            time_s = np.where(memory <= chain.limit, time_s, np.inf)
            if time_s.size and time_s.min() < best.time_s * (1 - 1e-12):
                cut = int(time_s.argmin()) + 1
                joined = Path.of(chain, np.concatenate([first[:cut], second[cut:]]))
                best = joined if joined.memory <= chain.limit and joined.time_s < best.time_s else best
    return best


def _switches(chain: Chain, choices: NDArray[np.int_]) -> Numbers:
    return chain.switch_s[np.arange(chain.blocks - 1), choices[:-1], choices[1:]]


def _parts(chain: Chain, path: Path) -> tuple[Numbers, Numbers]:
    """Time and memory of the first 1, 2, .. blocks."""
    rows = np.arange(chain.blocks)
    time_s = chain.time_s[rows, path.choices].copy()
    time_s[1:] += _switches(chain, path.choices)
    return time_s.cumsum(), chain.memory[rows, path.choices].cumsum()

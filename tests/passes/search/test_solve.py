"""The production solver against brute force and the dynamic programme."""

from __future__ import annotations

import numpy as np
import pytest

from hgc.errors import PlanError
from hgc.passes.sharding.search.exact import brute_force, solve_exact
from hgc.passes.sharding.search.problem import Chain
from hgc.passes.sharding.search.solve import price_bound, solve
from hgc.tools.bench.search_problems import random_chain

CASES = 600


def test_equals_brute_force() -> None:
    """On every random instance: the same cost, or nothing fits for either; the bounds hold."""
    infeasible = gaps = 0
    for seed in range(CASES):
        chain = random_chain(seed)
        wanted, found, programme = brute_force(chain), solve(chain, tolerance=0.0), solve_exact(chain)
        assert (wanted is None) == (found is None) == (programme is None), seed
        if wanted is None or found is None or programme is None:
            infeasible += 1
            continue
        assert found.time_s == pytest.approx(wanted.time_s, rel=1e-9), seed
        assert programme.time_s == pytest.approx(wanted.time_s, rel=1e-9), seed
        assert found.memory <= chain.limit, seed
        assert chain.time_of(found.choices) == found.time_s
        assert found.lower_bound_s == pytest.approx(wanted.time_s, rel=1e-9), seed
        assert price_bound(chain) <= wanted.time_s * (1 + 1e-9), seed
        gaps += price_bound(chain) < wanted.time_s * (1 - 1e-6)
    assert 20 < infeasible < CASES / 2
    assert gaps > 50, "instances where the price alone is not enough must be among them"


def test_bound_holds_when_labels_are_dropped() -> None:
    """With room for one label a block the result may be worse, and the bound says by how much at most."""
    worse = 0
    for seed in range(300):
        chain = random_chain(seed)
        wanted, found = brute_force(chain), solve(chain, tolerance=0.0, most_labels=1)
        if wanted is not None and found is not None:
            assert found.lower_bound_s <= wanted.time_s * (1 + 1e-9) <= found.time_s * (1 + 2e-9), seed
            worse += found.gap > 1e-9
    assert worse


def test_tolerance_is_kept() -> None:
    for seed in range(200):
        chain = random_chain(seed)
        wanted, found = brute_force(chain), solve(chain, tolerance=0.05)
        if wanted is not None:
            assert found is not None
            assert found.time_s <= wanted.time_s / (1 - 0.05) * (1 + 1e-9)
            assert found.lower_bound_s <= wanted.time_s * (1 + 1e-9)


def test_below_finds_only_what_is_faster() -> None:
    chain = random_chain(7)
    best = solve(chain, tolerance=0.0)
    assert best is not None
    assert solve(chain, tolerance=0.0, below_s=best.time_s) is None
    again = solve(chain, tolerance=0.0, below_s=best.time_s * 1.01)
    assert again is not None
    assert again.time_s == best.time_s


def test_passing_is_the_largest_not_the_sum() -> None:
    chain = Chain(np.ones((3, 1)), np.ones((3, 1)), np.zeros((1, 1)), 5.0, np.array([[1.0], [2.0], [1.5]]))
    found = solve(chain)
    assert found is not None
    assert found.memory == 5.0
    tighter = Chain(chain.time_s, chain.memory, np.zeros((1, 1)), 4.9, chain.passing)
    assert solve(tighter) is None


def test_shapes_are_checked() -> None:
    with pytest.raises(PlanError, match="memory has shape"):
        Chain(np.ones((2, 3)), np.ones((2, 2)), np.zeros((3, 3)), 1.0)
    with pytest.raises(PlanError, match="brute force would try"):
        brute_force(Chain(np.ones((30, 3)), np.ones((30, 3)), np.zeros((3, 3)), 1.0))

"""Counts of the paper, and what hgc's own space holds."""

from __future__ import annotations

import pytest

from hgc.errors import PlanError
from hgc.passes.sharding.search.pins import Pins
from hgc.passes.sharding.search.space import galvatron_strategies, space, strategies, trees
from hgc.strategy import Strategy


@pytest.mark.parametrize(
    ("devices", "all_", "pruned", "largest"),
    [(8, 34, 22, 22), (16, 73, 37, 30), (32, 136, 56, 38), (64, 229, 79, 46), (1024, 1021, 211, 78)],
)
def test_counts_of_the_decision_trees(devices: int, all_: int, pruned: int, largest: int) -> None:
    """Before and after pruning, without and with recomputation; and of one pipeline stage with it."""
    assert len(trees(devices, recompute=False, mixed_data=True)) == all_
    assert len(trees(devices, recompute=False)) == pruned
    assert len(trees(devices, mixed_data=True)) == 2 * all_
    found = trees(devices)
    assert len(found) == len(set(found)) == 2 * pruned
    assert sum(tree.stages == 1 for tree in found) == largest
    for tree in found:
        assert tree.stages * tree.data * tree.degree("tp") == devices


def test_trees_in_the_words_of_strategies() -> None:
    found = galvatron_strategies(4)
    assert set(map(str, found)) == {
        f"{text}{again}" for text in ("dp4", "dp4 zero3", "tp4", "dp2 tp2", "dp2 tp2 zero3") for again in ("", " recompute")
    }
    strided = [tree for tree in trees(4) if tree.levels == (("tp", 2), ("dp", 2))]
    assert strided
    assert all(tree.strategy() is None and not tree.is_tp_consecutive for tree in strided)


@pytest.mark.parametrize("devices", [1, 2, 6, 8])
def test_own_space_is_whole(devices: int) -> None:
    """Each combination of axes once, with everything that can differ."""
    found = strategies(devices)
    assert len(found) == len(set(found))
    assert all(strategy.devices == devices for strategy in found)
    meshes = {tuple(strategy.mesh.items()) for strategy in found}
    ordered = sum(devices % (a * b * c) == 0 for a in range(1, 9) for b in range(1, 9) for c in range(1, 9))
    assert len(meshes) == ordered
    assert len(found) == sum(3 * (1 if tp == devices else 4) * (2 if tp > 1 else 1) for tp in (dict(mesh).get("tp", 1) for mesh in meshes))
    assert set(galvatron_strategies(8)) <= set(strategies(8))


def test_pins() -> None:
    found = strategies(8)
    pins = Pins.of({"tp": 2, "recompute": "full"}, {"zero": (3, 2)})
    fixed = tuple(strategy for strategy in found if pins.allow(strategy))
    assert fixed
    assert all(s.tp == 2 and s.recompute == "full" and s.zero < 2 for s in fixed)
    assert Strategy(dp=4, tp=2, recompute="full") in fixed
    with pytest.raises(PlanError, match="no 'ep' to fix"):
        Pins.of({"ep": 2}, {})


def test_bad_names() -> None:
    with pytest.raises(PlanError, match="galvatron-bmw"):
        space("galvatron", 8)
    with pytest.raises(PlanError, match="power of two of devices, not 6; use 4"):
        space("galvatron-bmw", 6)
    assert all(strategy.tp <= 2 for strategy in space("hgc", 8, most_tp=2))

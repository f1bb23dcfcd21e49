"""Galvatron's formulas against numbers worked out by hand."""

from __future__ import annotations

import pytest

from hgc.errors import PlanError
from hgc.passes.sharding.search.galvatron import Layer, Machine, Training, pipeline
from hgc.passes.sharding.search.pipeline import Pipeline
from hgc.passes.sharding.search.space import Tree

LAYER = Layer(forward_s=0.01, parameter_bytes=4e8, activation_bytes={1: 9e7, 2: 5e7}, boundary_bytes=1e7, output_bytes=1e6)
MACHINE = Machine(4, {(2, True): 1e10, (2, False): 5e9, (4, True): 8e9}, {2: 2e9}, overlap=1.25)


def _one(tree: Tree, micro_batches: int = 1) -> Pipeline:
    return pipeline((LAYER,) * 2, [tree], MACHINE, Training(8, micro_batches), 1e12)


def test_data_parallel() -> None:
    """Two samples a rank: forward 0.02 s, backward 0.04 s; the sum sends 2 * 3/4 * 4e8 bytes at 8e9 = 0.075 s, which is longer than
    backward: 1.25 * 0.04 s together, then the other 0.035 s."""
    found = _one(Tree(1, (("dp", 4),)))
    assert found.micro_s[0, 0] == pytest.approx(0.06)
    assert found.last_s[0, 0] == pytest.approx(0.05 + 0.035 - 0.04)
    assert found.state[0, 0] == 16e8
    assert found.saved[0, 0] == 2 * 9e7


def test_sharded_and_recomputed() -> None:
    """Recomputation adds 0.02 s, the forward gather half a sum, 0.0375 s; states are a quarter and 0.003 of the whole."""
    found = _one(Tree(1, (("sdp", 4),), recompute=True))
    assert found.micro_s[0, 0] == pytest.approx(0.06 + 0.02 + 0.0375)
    assert found.state[0, 0] == pytest.approx(16e8 * 0.253)
    assert found.saved[0, 0] == 2 * 1e7
    many = _one(Tree(1, (("sdp", 4),)), micro_batches=2)
    assert many.state[0, 0] == pytest.approx(16e8 * (0.75 * 0.253 + 0.25))


def test_tensor_parallel_and_stages() -> None:
    """Eight samples on two ranks; four all-reduces of 8e6 bytes; two messages a stage over two layers."""
    found = _one(Tree(2, (("tp", 2),)))
    assert found.micro_s[0, 0] == pytest.approx(3 * 0.04 + 4 * 8e6 / 1e10 + 2 * 2 * 8e6 / 2e9 / 2)
    assert found.last_s[0, 0] == pytest.approx(0.0)
    assert found.state[0, 0] == 8e8


def test_switches_cost_where_tensor_parallelism_grows() -> None:
    found = pipeline((LAYER,) * 2, [Tree(1, (("dp", 4),)), Tree(1, (("dp", 2), ("tp", 2)))], MACHINE, Training(8, 1), 1e12)
    assert found.switch_s[0, 1] == pytest.approx(4 * 1e6 / 1e10 / 2)
    assert found.switch_s[1, 0] == found.switch_s[0, 0] == 0


def test_missing_bandwidths_are_named() -> None:
    with pytest.raises(PlanError, match="between 4 stages"):
        _one(Tree(4, ()))
    with pytest.raises(PlanError, match="no bandwidth of 8 ranks"):
        _one(Tree(1, (("dp", 8),)))

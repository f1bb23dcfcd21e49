"""Every rule of the table is proven by running it: sharded inputs, every rank, joined outputs and gradients equal the single device's."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hgc.ir import ops
from hgc.ir.ops.attention import attention
from hgc.ir.rules import registered, rule_for
from hgc.ir.rules.collectives import COLLECTIVES
from hgc.ir.rules.core import overloads
from tests.ir.rule_harness import Mesh, proofs, prove, single_device
from tests.ir.samples import SAMPLES, Draw

ARBITRARY = overloads("rand", "randn", "randint", "randint.low", "empty.memory_format")
"""Have no value that could be compared."""

NAMES_AXES = (
    ops.cross_entropy,
    ops.vocab_embedding,
    ops.mean,
    ops.batch_norm,
    ops.dropout,
    attention,
    *overloads("cross_entropy_loss", "embedding", "mean", "mean.dim", "linear", "reshape", "slice.Tensor", "split_with_sizes"),
)
"""Beside the collectives: operators that name axes, or become such; and a few whose arguments are sizes."""

steady = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


def name(target: Any) -> str:
    return str(target) if hasattr(target, "_schema") else str(target.__name__)


def check(target: Any, data: st.DataObject, mesh: Mesh) -> None:
    draw = Draw(data.draw, next(iter(mesh.values())), tuple(mesh))
    make = data.draw(st.sampled_from(SAMPLES[target]))
    single = single_device(make(draw, target))
    prove(single, proofs(single, mesh), mesh)


@pytest.mark.parametrize("target", SAMPLES, ids=name)
@settings(steady, max_examples=8)
@given(data=st.data(), ranks=st.sampled_from([2, 2, 3]))
def test_every_case_of_every_rule(target: Any, data: st.DataObject, ranks: int) -> None:
    check(target, data, {"ax": ranks})


@pytest.mark.parametrize("target", [t for t in SAMPLES if t in COLLECTIVES or t in NAMES_AXES], ids=name)
@settings(steady, max_examples=6)
@given(data=st.data(), mesh=st.sampled_from([{"ax": 2, "other": 2}, {"other": 2, "ax": 2}]))
def test_operators_that_name_an_axis_beside_another_axis(target: Any, data: st.DataObject, mesh: dict[str, int]) -> None:
    """Lowered for two axes one after the other, as the transform does; cases of one meet all cases of the other."""
    check(target, data, mesh)


@pytest.mark.parametrize("target", [t for t in registered() if t not in ARBITRARY], ids=name)
def test_every_operator_with_a_rule_has_a_sample(target: Any) -> None:
    assert target in SAMPLES, f"write a sample for {name(target)} in tests/ir/samples"


@pytest.mark.parametrize("target", SAMPLES, ids=name)
def test_every_sample_is_of_an_operator_with_a_rule(target: Any) -> None:
    assert rule_for(target) is not None

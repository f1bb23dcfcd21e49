"""The parts of the paper's planner, and the others' ways, against enumeration and by hand."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc.errors import PlanError
from hgc.passes.sequence.baselines import Shape, batch_adaptive, megatron, packs_of, ulysses
from hgc.passes.sequence.buckets import bucket_limits, padded
from hgc.passes.sequence.costs import Fleet, Ring, Sharding
from hgc.passes.sequence.groups import check
from hgc.passes.sequence.milp import padding_error, solve_milp
from hgc.passes.sequence.paper import flexsp
from hgc.passes.sequence.planner import plan_batch
from tests.passes.sequence.test_planner import COSTS, fastest

FLEET = Fleet(8, 4)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=8), st.integers(1, 4))
def test_buckets_add_the_least_padding(lengths: list[int], count: int) -> None:
    batch = np.array(lengths, dtype=float)
    limits = bucket_limits(batch, count)
    assert len(limits) <= count
    values = sorted(set(lengths))
    choices = (sorted({*chosen, values[-1]}) for chosen in itertools.combinations_with_replacement(values, count - 1))
    least = min(padded(batch, np.array(chosen, dtype=float)).sum() for chosen in choices)
    assert padded(batch, limits).sum() == least
    assert (padded(batch, limits) >= batch).all()


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1000, 14_000), min_size=1, max_size=4))
def test_the_programme_finds_the_fastest_groups(lengths: list[int]) -> None:
    batch = -np.sort(-np.array(lengths, dtype=float))
    fleet = Fleet(4, 4)
    expected = fastest(batch, COSTS, fleet)
    found = solve_milp(batch, COSTS.rates(fleet.degrees), fleet, limit_s=20.0)
    assert (found is None) == (expected == float("inf"))
    if found is not None:
        assert found.seconds(batch, COSTS.rates(fleet.degrees)) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("solver", ["packing", "milp"])
def test_the_papers_plan_holds_every_sequence(solver: str) -> None:
    batch = np.round(np.random.default_rng(3).lognormal(6.5, 1.5, 24)).clip(1, 20_000)
    plan = flexsp(batch, COSTS, FLEET, solver, limit_s=2.0, tried=2)
    check(plan, batch, COSTS, FLEET)
    assert plan_batch(batch, COSTS, FLEET).seconds <= plan.seconds * 1.01
    assert 0 <= padding_error(batch, 4) < 1


def test_a_solver_that_does_not_exist() -> None:
    with pytest.raises(PlanError, match="solver is 'scip'; expected one of packing, milp"):
        flexsp([5, 6], COSTS, FLEET, "scip")


def test_the_others_plans_hold_every_sequence() -> None:
    batch = np.round(np.random.default_rng(5).lognormal(7.0, 1.2, 60)).clip(1, 12_000)
    whole, adaptive = ulysses(batch, COSTS, FLEET, 50_000), batch_adaptive(batch, COSTS, FLEET)
    for plan in (whole, adaptive):
        check(plan, batch, COSTS, FLEET)
    assert {group.degree for each in whole.micro_batches for group in each.groups} == {8}
    assert len({group.degree for each in adaptive.micro_batches for group in each.groups}) == 1
    assert adaptive.seconds <= whole.seconds
    assert megatron(batch, COSTS, FLEET, 50_000, Shape(4096, 32, 50e9, 96e9)) > 0
    with pytest.raises(PlanError, match="8 devices hold no sequence of 60000 tokens"):
        ulysses(batch, COSTS, FLEET, 60_000)


def test_groups_of_one_degree_stay_inside_nodes() -> None:
    """Four of six devices leave two that no other group of four may take across the border."""
    fleet = Fleet(12, 6)
    plan = ulysses([24_000] * 5, COSTS, fleet, 28_000)
    check(plan, np.full(5, 24_000.0), COSTS, fleet)
    assert [len(each.groups) for each in plan.micro_batches] == [2, 2, 1]


def test_packs_are_full() -> None:
    packs = packs_of(np.array([5.0, 4.0, 3.0, 3.0, 2.0, 1.0]), 6.0)
    assert packs == [[0, 5], [1, 4], [2, 3]]


def test_rings_across_nodes_never_cost_more() -> None:
    """A group of several nodes takes the faster of an all-to-all and a ring; inside a node there is no ring."""
    ring = replace(COSTS, ring=Ring(key_bytes=5e5, bandwidth=6e9, node_devices=4))
    lengths = np.array([100.0, 5_000.0, 50_000.0, 500_000.0])
    plain, ringed = COSTS.rates((1, 4, 8)).busy(lengths), ring.rates((1, 4, 8)).busy(lengths)
    assert (ringed <= plain).all()
    assert (ringed[:2] == plain[:2]).all()
    assert ringed[2, -1] == pytest.approx(5e-9 * 25e10 / 8 + 5e5 * (2e-4 + 2e6 / 104e9) / 8)  # the ring hides behind attention


def test_sharding_is_part_of_the_time() -> None:
    batch = [3000] * 20
    free = plan_batch(batch, COSTS, FLEET)
    dear = plan_batch(batch, replace(COSTS, sharding=Sharding(2e9, micro_batch_s=0.5, step_s=1.0)), FLEET)
    assert dear.seconds == pytest.approx(free.seconds + 1.0 + 0.5 * len(dear.micro_batches))

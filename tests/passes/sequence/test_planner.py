"""Plans for batches of unlike lengths: nothing lost, never above memory, bounds that hold, optimal where it can be enumerated."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc.errors import PlanError
from hgc.passes.sequence.blaster import even_borders
from hgc.passes.sequence.costs import Fleet, Numbers, SequenceCosts, Sharding
from hgc.passes.sequence.groups import check
from hgc.passes.sequence.micro_batch import TOLERANCE, homogeneous, solve
from hgc.passes.sequence.planner import plan_batch

COSTS = SequenceCosts(
    quadratic_s=5e-9,
    linear_s=2e-4,
    fixed_s=0.3,
    exchange_bytes=2e6,
    bandwidths=((2, 120e9), (4, 104e9), (8, 10e9), (16, 5e9)),
    token_bytes=4e6,
    memory_bytes=30e9,
    sharding=Sharding(state_bytes=2e9),
)
"""7,000 tokens on a device."""
lengths_of_batches = st.lists(st.integers(1, 27_000), min_size=1, max_size=40)
fleets = st.sampled_from([Fleet(4, 4), Fleet(8, 4), Fleet(6, 6), Fleet(12, 6), Fleet(16, 8), Fleet(5, 8)])


def fastest(lengths: Numbers, costs: SequenceCosts, fleet: Fleet) -> float:
    """Of all ways to put the sequences into groups, by enumeration; infinite if none fits."""
    best = float("inf")
    rates = costs.rates(fleet.degrees)
    for parts in partitions(list(range(len(lengths)))):
        sums = [lengths[part].sum() for part in parts]
        for degrees in itertools.product(range(len(fleet.degrees)), repeat=len(parts)):
            if fleet.layout([fleet.degrees[d] for d in degrees]) is None:
                continue
            if all(tokens <= rates.tokens[d] for tokens, d in zip(sums, degrees, strict=True)):
                best = min(best, max(rates.seconds(d, lengths[part]) for part, d in zip(parts, degrees, strict=True)))
    return best


def partitions(items: list[int]) -> list[list[list[int]]]:
    if not items:
        return [[]]
    found = []
    for rest in partitions(items[1:]):
        found += [[[items[0]], *rest]] + [[*rest[:i], [items[0], *rest[i]], *rest[i + 1 :]] for i in range(len(rest))]
    return found


@settings(max_examples=120, deadline=None)
@given(lengths_of_batches, fleets)
def test_every_sequence_once_within_memory_above_the_bound(lengths: list[int], fleet: Fleet) -> None:
    batch = np.array(lengths, dtype=float)
    if batch.max() > fleet.degrees[-1] * COSTS.tokens_per_device:
        with pytest.raises(PlanError, match="hold at most"):
            plan_batch(lengths, COSTS, fleet)
        return
    plan = plan_batch(lengths, COSTS, fleet)
    check(plan, batch, COSTS, fleet)
    assert plan.bound_s <= plan.seconds
    rates = COSTS.rates(fleet.degrees)
    for each in plan.micro_batches:
        found = max(rates.seconds(fleet.degrees.index(g.degree), batch[list(g.sequences)]) for g in each.groups)
        assert each.seconds == pytest.approx(found)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 20_000), min_size=1, max_size=5), st.sampled_from([Fleet(4, 4), Fleet(8, 4), Fleet(6, 3), Fleet(5, 5)]))
def test_few_sequences_are_placed_as_well_as_can_be(lengths: list[int], fleet: Fleet) -> None:
    batch = -np.sort(-np.array(lengths, dtype=float))
    expected = fastest(batch, COSTS, fleet)
    solved = solve(batch, COSTS.rates(fleet.degrees), fleet)
    if expected == float("inf"):
        assert solved is None
        return
    assert solved is not None
    packed, bound = solved
    assert bound <= expected * (1 + 1e-9)
    assert packed.seconds(batch, COSTS.rates(fleet.degrees)) <= expected * (1 + TOLERANCE)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 6000), min_size=1, max_size=60))
def test_never_slower_than_groups_of_one_degree(lengths: list[int]) -> None:
    batch = -np.sort(-np.array(lengths, dtype=float))
    fleet = Fleet(8, 4)
    one = homogeneous(batch, COSTS.rates(fleet.degrees), fleet)
    if one is not None:
        assert plan_batch(lengths, COSTS, fleet).seconds <= one.seconds(batch, COSTS.rates(fleet.degrees)) * (1 + 1e-9)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 4))
def test_even_borders_have_the_least_largest_sum(lengths: list[int], count: int) -> None:
    batch = -np.sort(-np.array(lengths, dtype=float))
    borders = even_borders(batch, count)
    if count > len(lengths):
        assert borders is None
        return
    assert borders is not None
    assert len(borders) == count + 1

    def largest(cuts: tuple[int, ...]) -> float:
        return max(batch[a:b].sum() for a, b in itertools.pairwise((0, *cuts, len(batch))))

    best = min(largest(cuts) for cuts in itertools.combinations(range(1, len(batch)), count - 1))
    assert largest(tuple(borders[1:-1])) == best
    assert sorted(set(borders)) == borders


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "at least one"),
        ([3, 0], "sequence 1 has 0 tokens"),
        ([3, 2.5], "sequence 1 has 2.5 tokens"),
        ([float("nan")], "sequence 0 has nan tokens"),
        ([5, 70_000], "sequence 1 has 70000 tokens, but 8 devices together hold at most 56000"),
    ],
)
def test_lengths_that_cannot_be(lengths: list[float], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_batch(lengths, COSTS, Fleet(8, 8))


def test_fleets_that_cannot_be() -> None:
    with pytest.raises(PlanError, match="10 devices are not whole nodes of 4"):
        Fleet(10, 4)
    with pytest.raises(PlanError, match="groups of 6 devices fit neither inside a node of 4"):
        Fleet(16, 4, degrees=(1, 6))


def test_groups_stay_inside_nodes() -> None:
    fleet = Fleet(16, 8)
    assert fleet.degrees == (1, 2, 4, 8, 16)
    assert fleet.layout([1, 8, 4, 2, 1]) == [14, 0, 8, 12, 15]
    assert fleet.layout([8, 8, 1]) is None
    assert Fleet(12, 6).layout([4, 4, 2, 2]) == [0, 6, 4, 10]
    assert Fleet(12, 6).layout([4, 4, 4]) is None

"""What overlaps inside an action, on stages made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hgc.backends.simulator import Meeting, Timeline, Work, play
from hgc.backends.simulator.stage_steps import StageWork
from hgc.backends.simulator.units import ROOT, Bucket, Unit
from hgc.cost.execution import EAGER
from hgc.cost.stage_time import BlockTime, Segment
from hgc.schedule import Action, Schedule, make

LAYERS = 4


def block(name: str, tp: float = 0.0) -> BlockTime:
    """1 s forward, 1 s for inputs, 1 s for weights, and collectives over tp."""
    collective = (Segment(tp, "all_reduce", "tp"),) if tp else ()
    return BlockTime(name, (Segment(1.0), *collective), (Segment(1.0), Segment(1.0, weight=True), *collective))


def stage(zero: int = 0, tp: float = 0.0, **options: Any) -> StageWork:
    """Four layers whose state takes 0.5 s to gather, scatter or sum."""
    made = StageWork(
        blocks=tuple((f"layers.{number}", block("Layer", tp)) for number in range(LAYERS)),
        unit_of=tuple(range(1, LAYERS + 1)) if zero else (ROOT,) * LAYERS,
        units={unit: Unit(0.5, 0.5) for unit in range(LAYERS + 1)} if zero else {},
        buckets=() if zero else tuple(Bucket(("dp",), number, 0.5) for number in reversed(range(LAYERS))),
        zero=zero,
        axes=("dp",),
        seconds=lambda kind, axes, bytes_: bytes_,
        execution=EAGER,
        runs_ahead=True,
    )
    return replace(made, **options)


def step(found: StageWork, batches: int = 1) -> Timeline:
    def steps(action: Action) -> Any:
        return found.steps(action.kind, first=action.micro_batch == 0, last=action.micro_batch == batches - 1)

    return play(make("1f1b", [[0]], batches), Work(steps, end=(Meeting((0,), found.synchronised()),)))


def test_buckets_are_summed_beside_the_blocks_that_follow() -> None:
    found = step(stage())
    assert found.step_s == 12 + 0.5  # nothing is left to hide the last one behind
    assert (found.mean.on("dp").total_s, found.mean.on("dp").exposed_s) == (2.0, 0.5)
    begins = [event.begin_s for event in found.events[0] if event.row == "dp"]
    assert begins == [6.0, 8.0, 10.0, 12.0]


def test_buckets_wait_for_those_before() -> None:
    late = (Bucket(("dp",), 0, 0.5), Bucket(("dp",), 3, 0.5))
    found = step(stage(buckets=late))
    assert [event.begin_s for event in found.events[0] if event.row == "dp"] == [12.0, 12.5]
    assert found.step_s == 13.0


def test_only_the_last_micro_batch_sums_gradients() -> None:
    found = step(stage(), batches=3)
    assert found.step_s == 36 + 0.5
    assert found.mean.on("dp").total_s == 2.0


def test_without_overlap_sums_follow_the_last_backward() -> None:
    found = step(stage(execution=replace(EAGER, overlap_gradients=False)))
    assert found.step_s == 12 + 2
    assert found.mean.on("dp").exposed_s == 2.0


@pytest.mark.parametrize("zero", [1, 2])
def test_whole_gradients_are_summed_where_told(zero: int) -> None:
    """An all-reduce, which costs more; parameters are gathered as ever, and ZeRO 3 never sums whole gradients."""
    behind = replace(EAGER, overlap_gradients=False)
    priced = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0}

    def total(number: int, sums_whole: bool) -> float:
        changed = replace(behind, sums_whole=sums_whole)
        return step(stage(number, execution=changed, seconds=lambda kind, axes, bytes_: priced[kind] * bytes_)).step_s

    assert total(zero, True) - total(zero, False) == pytest.approx((LAYERS + 1) * 0.5)
    assert total(3, True) == total(3, False)


def gathers(found: Timeline) -> int:
    return sum(event.name.startswith("gather") for event in found.events[0])


def scatters(found: Timeline) -> int:
    return sum(event.name.startswith("scatter") for event in found.events[0])


@pytest.mark.parametrize(
    ("zero", "gathered", "scattered"),
    [(1, 5, 5), (2, 5, 3 * 5), (3, 3 * (5 + 4), 3 * 5)],
)
def test_how_often_state_moves_in_three_micro_batches(zero: int, gathered: int, scattered: int) -> None:
    """As in hgc.runtime.fsdp: whole from the first forward on (1, 2), or while a block runs (3); summed once (1), or each time."""
    found = step(stage(zero), batches=3)
    assert (gathers(found), scatters(found)) == (gathered, scattered)


def test_units_are_gathered_while_the_one_before_runs() -> None:
    found = step(stage(3))
    # exposed: the root and the first unit in front, in backward the last unit, at the end the scatter of the first unit and the root's
    assert found.step_s == 12 + 0.5 + 0.5 + 0.5 + 0.5 + 0.5
    in_line = step(stage(3, runs_ahead=False))
    assert in_line.step_s == 12 + 0.5 * (5 + 4 + 5)
    assert in_line.mean.on("dp").exposed_s == in_line.mean.on("dp").total_s


def test_tensor_parallel_sums_run_beside_weights_where_told() -> None:
    exposed = step(stage(tp=0.5, buckets=()))
    assert exposed.step_s == 12 + 8 * 0.5
    beside = step(stage(tp=0.5, buckets=(), execution=replace(EAGER, overlap_products=True)))
    assert beside.step_s == 12 + 4 * 0.5
    assert beside.mean.on("tp").total_s == exposed.mean.on("tp").total_s
    slow = step(stage(tp=1.5, buckets=(), execution=replace(EAGER, overlap_products=True)))
    assert slow.step_s == 12 + 4 * 1.5 + 4 * 0.5


def test_inputs_and_weights_apart_take_what_they_take_together() -> None:
    whole, halves = stage(tp=0.5), stage(tp=0.5)
    together = step(whole).step_s
    apart = play(
        Schedule.parse("rank 0: 0F0 0I0 0W0"),
        Work(lambda action: halves.steps(action.kind, first=True, last=True), end=(Meeting((0,), halves.synchronised()),)),
    )
    assert apart.step_s == pytest.approx(together)
    assert {event.begin_s for event in apart.events[0] if event.row == "dp"} == {13.0, 14.0, 15.0, 16.0}  # sums follow the weights


def test_state_that_moves_ahead_is_hidden_and_waited_for_at_the_end() -> None:
    """The first gathers and the last scatters have nothing beside them."""
    ahead = replace(EAGER, state_ahead=True)
    found = Work(
        lambda action: stage(1, execution=ahead).steps(action.kind, first=True, last=True),
        begin=(Meeting((0,), stage(1, execution=ahead).begins()),),
        end=(Meeting((0,), stage(1, execution=ahead).synchronised()),),
    )
    played = play(make("1f1b", [[0]], 1), found)
    assert (gathers(played), scatters(played)) == (5, 5)
    assert played.step_s == 12 + 2 * 0.5 + 2 * 0.5  # the root and the first unit in front, the first unit and the root behind


def test_tensor_parallel_gathers_run_in_pieces_beside_products_where_told() -> None:
    layer = BlockTime(
        "Layer",
        (Segment(0.5, "all_gather", "tp"), Segment(1.0), Segment(0.5, "reduce_scatter", "tp")),
        (Segment(1.0),),
    )
    plain = stage(buckets=(), blocks=(("layers.0", layer),), unit_of=(ROOT,), tensor_ranks=4)
    assert step(plain).step_s == 3.0
    pieces = step(replace(plain, execution=replace(EAGER, overlap_tensor=True)))
    assert pieces.step_s == pytest.approx(3.0 - 0.75 * 0.5)  # a product has one collective beside it, all but one piece of four
    assert pieces.mean.on("tp").total_s == pytest.approx(1.0)


def test_computation_beside_a_collective_is_slower() -> None:
    layer = BlockTime("Layer", (Segment(0.5, "all_gather", "tp"), Segment(1.0)), (Segment(1.0),))
    execution = replace(EAGER, overlap_tensor=True, overlap_slowdown=1.2)
    found = step(stage(buckets=(), blocks=(("layers.0", layer),), unit_of=(ROOT,), tensor_ranks=2, execution=execution))
    assert found.step_s == pytest.approx(2.0 + 0.25 + 0.2 * 0.25)  # one piece of two is exposed, beside the other one products slow down

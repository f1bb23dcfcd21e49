"""The engine against closed forms and cases small enough to work out by hand."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc.backends.simulator import Meeting, Message, Step, Timeline, Work, play
from hgc.schedule import Action, Schedule, chain, make
from tests.schedule.test_schedule import line, pipelines, there_and_back, waves


def work(forward: float = 1.0, input_: float = 1.0, weight: float = 1.0, send: float = 0.0, **options: Any) -> Work:
    seconds = {"F": forward, "B": input_ + weight, "I": input_, "W": weight}
    edges = chain(64)
    messages = {(edge, way): Message(send) for edge in edges for way in "FB"}
    return Work(lambda action: (Step(seconds[action.kind], name=str(action)),), messages, **options)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "batches"), [(1, 1), (1, 5), (4, 4), (4, 9), (8, 3), (16, 64)])
def test_makespan_of_gpipe_and_1f1b(name: str, stages: int, batches: int) -> None:
    found = play(make(name, line(stages), batches), work(2.0, 3.0, 1.5))
    assert found.step_s == pytest.approx((batches + stages - 1) * 6.5)
    assert all(parts.bubble_s == pytest.approx((stages - 1) * 6.5) for parts in found.parts)


@pytest.mark.parametrize(("places", "virtual", "batches"), [(4, 2, 8), (4, 4, 8), (8, 2, 32), (3, 3, 6)])
def test_bubble_of_interleaved(places: int, virtual: int, batches: int) -> None:
    """Megatron-LM (Narayanan et al. 2021, section 2.2.2): 1/virtual of 1F1B's."""
    found = play(make("interleaved", line(places, virtual), batches), work(1.0 / virtual, 1.0 / virtual, 1.0 / virtual))
    assert found.step_s == pytest.approx(3 * batches + 3 * (places - 1) / virtual)
    assert found.mean.bubble_s == pytest.approx(3 * (places - 1) / virtual)


@pytest.mark.parametrize(("stages", "batches"), [(2, 4), (4, 8), (4, 13), (8, 24)])
@pytest.mark.parametrize(("forward", "input_", "weight"), [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8)])
def test_bubble_of_zb_h1(stages: int, batches: int, forward: float, input_: float, weight: float) -> None:
    """Qi et al. 2024, table 2: (p - 1)(T_F + T_B - T_W)."""
    found = play(make("zb-h1", line(stages), batches), work(forward, input_, weight))
    assert found.step_s == pytest.approx(batches * (forward + input_ + weight) + (stages - 1) * (forward + input_ - weight))


@pytest.mark.parametrize(("places", "batches"), [(2, 4), (3, 6), (4, 8), (4, 20), (8, 32)])
def test_zbv_leaves_almost_nothing_idle(places: int, batches: int) -> None:
    """Qi et al. 2024, section 6: with equal times nothing but the way to the last place."""
    found = play(make("zbv", there_and_back(places), batches), work())
    assert found.step_s == 6 * batches + places - 1
    unlike = play(make("zbv", there_and_back(places), batches), work(1.0, 1.2, 0.8))
    assert unlike.step_s <= 1.02 * found.step_s


def conserved(found: Timeline) -> None:
    for parts, events in zip(found.parts, found.events, strict=True):
        assert parts.step_s == pytest.approx(found.step_s)
        assert min(parts.bubble_s, *(axis.exposed_s for axis in parts.communication), 0.0) >= -1e-9
        for row in {event.row for event in events}:
            times = sorted((event.begin_s, event.end_s) for event in events if event.row == row)
            assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(times)), row
        busy = sum(event.end_s - event.begin_s for event in events if event.row in ("compute", "optimizer"))
        assert busy == pytest.approx(parts.compute_s + parts.optimizer_s)


steps = st.lists(
    st.builds(Step, st.floats(0, 3), st.sampled_from(["compute", "compute", "tp", "dp"]), key=st.sampled_from(["", "", "a", "b"]))
    | st.builds(Step, wait=st.sampled_from(["a", "b"])),
    max_size=5,
).map(tuple)


@settings(max_examples=150, deadline=None)
@given(pipelines() | waves(), st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]), st.integers(1, 6), st.data())
def test_busy_and_idle_make_the_step(pipeline: Any, name: str, batches: int, data: st.DataObject) -> None:
    ranks, edges = pipeline
    of_kind = {kind: data.draw(steps) for kind in "FBIW"}
    travelling = edges if edges is not None else chain(len(ranks))
    messages = {(edge, way): Message(data.draw(st.floats(0, 2))) for edge in travelling for way in "FB"}
    end = tuple(Meeting((stage,), (Step(wait="a"), Step(1.0, "optimizer"))) for stage in range(len(ranks)))
    everything = Work(lambda action: of_kind[action.kind], messages, end, sends_block=data.draw(st.booleans()))
    conserved(play(make(name, ranks, batches, edges), everything, edges))


def one_rank(*found: Step) -> Timeline:
    return play(Schedule.parse("rank 0: 0F0 0B0"), Work(lambda action: found if action.kind == "F" else ()))


def test_a_collective_is_exposed_unless_it_has_a_key() -> None:
    found = one_rank(Step(2.0), Step(3.0, "tp"), Step(1.0))
    assert found.step_s == 6.0
    assert found.parts[0].on("tp").exposed_s == 3.0
    found = one_rank(Step(2.0), Step(3.0, "tp", key="a"), Step(1.0), Step(wait="a"), Step(1.0))
    assert found.step_s == 6.0
    assert (found.parts[0].on("tp").exposed_s, found.parts[0].on("tp").hidden_s) == (2.0, 1.0)
    found = one_rank(Step(3.0, "tp", key="a"), Step(4.0), Step(wait="a"))
    assert found.step_s == 4.0
    assert (found.parts[0].on("tp").exposed_s, found.parts[0].on("tp").hidden_s) == (0.0, 3.0)


def test_collectives_of_an_axis_follow_one_another_and_those_of_two_do_not() -> None:
    assert one_rank(Step(3.0, "dp", key="a"), Step(3.0, "dp", key="b"), Step(wait="a"), Step(1.0), Step(wait="b")).step_s == 6.0
    assert one_rank(Step(3.0, "dp", key="a"), Step(3.0, "tp", key="b"), Step(wait="a"), Step(1.0), Step(wait="b")).step_s == 4.0


def test_what_nobody_waits_for_does_not_count() -> None:
    found = one_rank(Step(1.0), Step(9.0, "dp", key="a"))
    assert found.step_s == 1.0
    assert found.parts[0].on("dp").hidden_s == 9.0


def test_messages_take_their_turn() -> None:
    """Two forwards of 1 s, two messages of 3 s: the second waits for the first."""
    lists = "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    seconds = {"F": 1.0, "B": 0.0}
    costs = Work(lambda action: (Step(seconds[action.kind]),), {((0, 1), "F"): Message(3.0)})
    found = play(Schedule.parse(lists), costs)
    assert found.step_s == 8.0  # 1 + 3 + 3 + 1
    receiver = found.parts[1]
    assert (receiver.compute_s, receiver.bubble_s, receiver.on("pp").exposed_s) == (2.0, 1.0, 5.0)


def test_a_blocking_send_holds_the_sender() -> None:
    lists = "rank 0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1\nrank 1: 1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"
    free, blocked = (
        play(Schedule.parse(lists), Work(lambda action: (Step(1.0),), {((0, 1), "F"): Message(1.0)}, sends_block=block))
        for block in (False, True)
    )
    assert blocked.parts[0].on("pp").exposed_s == 2.0
    assert free.parts[0].on("pp").exposed_s == 0.0
    assert blocked.step_s == free.step_s + 1.0


def test_unpacking_is_paid_by_the_receiver() -> None:
    schedule = make("gpipe", line(2), 1)
    costs = Work(lambda action: (Step(1.0),), {((0, 1), "F"): Message(1.0, (Step(0.5, "tp"),))})
    found = play(schedule, costs)
    assert found.step_s == 5.5
    assert found.parts[1].on("tp").exposed_s == 0.5


def test_the_end_is_taken_together() -> None:
    schedule = make("gpipe", line(2), 1)
    end = (Meeting((0, 1), (Step(2.0, "tied"),)), Meeting((0,), (Step(1.0, "optimizer"),)), Meeting((1,), (Step(3.0, "optimizer"),)))
    found = play(schedule, Work(lambda action: (Step(1.0),), end=end))
    assert found.step_s == 4 + 2 + 3
    assert found.parts[1].bubble_s == 1 + 1  # before its forward, and for the other's backward
    assert [parts.optimizer_s for parts in found.parts] == [1.0, 3.0]
    assert found.parts[0].on("tied").exposed_s == 2.0


def test_unlike_stages_take_the_time_of_the_slowest() -> None:
    seconds = [1.0, 5.0, 1.0]
    found = play(make("1f1b", line(3), 10), Work(lambda action: (Step(seconds[action.stage]),)))
    assert found.step_s == pytest.approx(10 * 10 + 2)
    assert found.parts[1].bubble_s == pytest.approx(2)


def test_ranks_that_do_the_same_are_one() -> None:
    found = play(make("1f1b", line(2, width=512), 4), work())
    assert found.ranks == (tuple(range(512)), tuple(range(512, 1024)))
    assert len(found.events) == 2


def test_order_of_looking_does_not_matter() -> None:
    """The same schedule with its ranks numbered backwards."""
    ranks = line(5)
    one = play(make("1f1b", ranks, 9), work(1.0, 0.7, 0.4, send=0.3))
    other = play(make("1f1b", ranks[::-1], 9), work(1.0, 0.7, 0.4, send=0.3))
    assert one.step_s == pytest.approx(other.step_s)
    assert [p.bubble_s for p in one.parts] == pytest.approx([p.bubble_s for p in other.parts][::-1])


def test_actions_are_shown() -> None:
    found = play(make("1f1b", line(2), 2), work())
    shown = [event.name for event in found.events[1] if event.row == "actions"]
    assert shown == ["1F0", "1B0", "1F1", "1B1"]
    assert str(Action.parse(shown[0])) == "1F0"

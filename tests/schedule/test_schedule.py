"""Schedules: every order that is made runs to its end within its memory, and what is wrong is found."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from hgc import plan
from hgc.errors import PlanError
from hgc.schedule import NAMES, Action, Schedule, check, in_flight, make
from hgc.schedule.layout import layout

Ranks = list[list[int]]


def line(places: int, virtual: int = 1, width: int = 1) -> Ranks:
    """Stages that take turns on ``places`` groups of ``width`` ranks."""
    return [[width * place + rank for rank in range(width)] for _ in range(virtual) for place in range(places)]


def there_and_back(places: int, width: int = 1) -> Ranks:
    forth = line(places, width=width)
    return forth + forth[::-1]


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Ranks, list[tuple[int, int]] | None]:
    """Places of unlike sizes, stages on any of them in any order; often with edges that skip stages or join towers."""
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    places = [list(range(first, first + size)) for first, size in zip(firsts, sizes, strict=True)]
    chosen = draw(st.permutations(range(len(places)))) + draw(st.lists(st.integers(0, len(places) - 1), max_size=5))
    ranks = [places[index] for index in chosen]
    if draw(st.booleans()):
        return ranks, None
    possible = [(a, b) for b in range(len(ranks)) for a in range(b)]
    return ranks, sorted(draw(st.sets(st.sampled_from(possible), max_size=12))) if possible else []


@st.composite
def waves(draw: st.DrawFn) -> tuple[Ranks, list[tuple[int, int]]]:
    """Stages on sets of ranks that overlap."""
    devices = draw(st.integers(1, 5))
    ranks = draw(st.lists(st.sets(st.integers(0, devices - 1), min_size=1).map(sorted), min_size=1, max_size=6))
    assume(set().union(*ranks) == set(range(max(map(max, ranks)) + 1)))
    possible = [(a, b) for b in range(len(ranks)) for a in range(b)]
    return ranks, sorted(draw(st.sets(st.sampled_from(possible), max_size=8))) if possible else []


def work(schedule: Schedule, ranks: Ranks) -> None:
    """Each rank does the forward and the backward of its stages, and nothing else, once for each micro-batch."""
    for rank, actions in enumerate(schedule.lists):
        mine = {stage for stage, hosts in enumerate(ranks) if rank in hosts}
        counts = Counter((action.stage, action.micro_batch, action.kind) for action in actions if action.is_compute)
        expected = {(stage, batch) for stage in mine for batch in range(schedule.micro_batches)}
        assert {(stage, batch) for stage, batch, _ in counts} == expected
        for stage, batch in expected:
            kinds = [kind for kind in ("F", "B", "I", "W") for _ in range(counts[stage, batch, kind])]
            assert kinds in (["F", "B"], ["F", "I", "W"])


@settings(max_examples=150, deadline=None)
@given(pipelines() | waves(), st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1"]), st.integers(1, 9))
def test_every_schedule_runs_to_its_end(pipeline: tuple[Ranks, Any], name: str, micro_batches: int) -> None:
    ranks, edges = pipeline
    schedule = make(name, ranks, micro_batches, edges)
    check(schedule, edges)
    work(schedule, ranks)
    assert schedule.stages == tuple(map(tuple, ranks))
    assert Schedule.parse(str(schedule)) == schedule


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 20), st.integers(1, 3))
def test_interleaved_in_turns(places: int, virtual: int, micro_batches: int, width: int) -> None:
    ranks = line(places, virtual, width)
    schedule = make("interleaved", ranks, micro_batches)
    check(schedule)
    work(schedule, ranks)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 6), st.integers(1, 20))
def test_zbv(places: int, micro_batches: int) -> None:
    ranks = there_and_back(places)
    schedule = make("zbv", ranks, micro_batches)
    check(schedule)
    work(schedule, ranks)
    for actions in schedule.lists:
        changes = [{"F": 1, "W": -1}.get(action.kind, 0) for action in actions]
        assert max(accumulate(changes)) <= 2 * places


@settings(max_examples=60, deadline=None)
@given(pipelines() | waves(), st.integers(1, 9))
def test_1f1b_holds_as_many_as_stages_follow(pipeline: tuple[Ranks, Any], micro_batches: int) -> None:
    ranks, edges = pipeline
    depths = layout(ranks, micro_batches, edges).depths
    for name, most in (("1f1b", depths), ("zb-h1", [max(depths)] * len(ranks))):
        alive = in_flight(make(name, ranks, micro_batches, edges))
        assert all(found <= limit for found, limit in zip(alive, most, strict=True))


def test_gpipe_holds_all() -> None:
    assert in_flight(make("gpipe", line(3), 7)) == (7, 7, 7)
    assert in_flight(make("1f1b", line(3), 7)) == (3, 2, 1)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 5), st.integers(2, 8), st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.randoms(use_true_random=False))
def test_exchanged_actions_are_found(places: int, micro_batches: int, name: str, chance: random.Random) -> None:
    """Exchanging two computations with each other, or two messages of one queue, breaks the order at that rank or before it."""
    schedule = make(name, line(places), micro_batches)
    rank = chance.randrange(places)
    actions = list(schedule.lists[rank])
    pairs = [
        (i, j)
        for i, one in enumerate(actions)
        for j, other in enumerate(actions[i + 1 :], i + 1)
        if one.micro_batch == other.micro_batch and {one.kind, other.kind} in ({"F", "B"}, {"I", "W"}, {"F", "SEND_F"}, {"RECV_B", "B"})
    ]
    assume(pairs)
    i, j = chance.choice(pairs)
    actions[i], actions[j] = actions[j], actions[i]
    broken = Schedule((*schedule.lists[:rank], tuple(actions), *schedule.lists[rank + 1 :]))
    with pytest.raises(PlanError, match=r"rank \d+ is stuck at \d+\w+\d+: "):
        check(broken)


BROKEN = {
    "receives in another order": (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1F1 1B1 1SEND_B1 1RECV_F0 1F0 1B0 1SEND_B0",
    ),
    "both wait": ("0F0 0RECV_B0 0B0 0SEND_F0", "1RECV_F0 1F0 1B0 1SEND_B0"),
    "no receive": ("0F0 0SEND_F0 0RECV_B0 0B0", "1F0 1B0 1SEND_B0"),
    "nobody takes it": ("0F0 0SEND_F0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
    "twice": ("0F0 0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1B0 1SEND_B0"),
    "no backward": ("0F0 0SEND_F0 0RECV_B0 0B0", "1RECV_F0 1F0 1SEND_B0"),
}
MESSAGES = {
    "receives in another order": "rank 1 is stuck at 1RECV_F1: rank 0 sends 0SEND_F0 first",
    "both wait": "rank 1 is stuck at 1RECV_F0: rank 0 has not sent 0SEND_F0 and is at 0RECV_B0",
    "no receive": "rank 1 is stuck at 1F0: 1RECV_F0 does not stand before it",
    "nobody takes it": "rank 0 is stuck at 0B0: 0RECV_B0 does not stand before it",
    "twice": "rank 0 does 0F0 2 times; keep it once",
    "no backward": "rank 1 does F with micro-batch 0 of stage 1; expected F and B",
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_is_wrong_is_named(case: str) -> None:
    schedule = Schedule.parse("\n".join(f"rank {rank}: {actions}" for rank, actions in enumerate(BROKEN[case])))
    with pytest.raises(PlanError) as refused:
        check(schedule)
    assert MESSAGES[case] in str(refused.value)


def test_ranks_of_a_stage_meet() -> None:
    lists = "rank 0: 0F0 0F1 0B0 0B1\nrank 1: 0F1 0F0 0B0 0B1"
    with pytest.raises(PlanError, match="rank 1 is stuck at 0F1: rank 0, which runs the stage with it, is at 0F0"):
        check(Schedule.parse(lists))


def test_a_message_to_nobody() -> None:
    lists = "rank 0: 0F0 0SEND_F0 0B0\nrank 1: 1F0 1B0"
    check(Schedule.parse(lists.replace("0SEND_F0 ", "")), edges=[])
    with pytest.raises(PlanError, match="rank 0 is stuck at 0SEND_F0: stage 0 has no reader on other ranks"):
        check(Schedule.parse(lists), edges=[])


def test_equal_ranks_share_a_list() -> None:
    schedule = make("1f1b", line(2, width=512), 4)
    assert schedule.devices == 1024
    assert len({id(actions) for actions in schedule.lists}) == 2
    assert str(schedule).splitlines()[1].startswith("ranks 512-1023: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1")
    assert make("1f1b", [[0, 2], [1, 3]], 1) == Schedule.parse("ranks 0,2: 0F0 0SEND_F0 0RECV_B0 0B0\nranks 1,3: 1RECV_F0 1F0 1B0 1SEND_B0")


# -- torch's own orders -----------------------------------------------------------------------------------------------------------------


class FakeStage:
    """What torch's generators ask of a stage."""

    def __init__(self, index: int, rank: int, places: int, stages: int) -> None:
        self.stage_index, self.group_rank, self.group_size, self.num_stages = index, rank, places, stages
        self.is_first, self.is_last = index == 0, index == stages - 1
        self.has_backward, self.device, self.submod = True, "cpu", None
        self.stage_index_to_group_rank = {stage: stage % places for stage in range(stages)}


def computed(actions: Any) -> list[str]:
    return [str(action) for action in actions if action is not None and str(action.computation_type.value) in ("F", "B", "I", "W")]


def ours(schedule: Schedule, rank: int) -> list[str]:
    return [str(action) for action in schedule.lists[rank] if action.is_compute]


@pytest.mark.parametrize("places", [1, 2, 3, 4])
@pytest.mark.parametrize("extra", [0, 1, 5])
def test_1f1b_and_gpipe_as_in_torch(places: int, extra: int) -> None:
    micro_batches = places + extra
    for name, cls in (("1f1b", torch_schedules.Schedule1F1B), ("gpipe", torch_schedules.ScheduleGPipe)):
        stage: Any = FakeStage(0, 0, places, places)
        order = cls(stage, micro_batches)._get_pipeline_order()
        assert order is not None
        schedule = make(name, line(places), micro_batches)
        for rank in range(places):
            found, expected = ours(schedule, rank), computed(order[rank])
            if rank == places - 1 and name == "1f1b":  # torch's table numbers the last rank's forwards from 1; its loop does not
                found, expected = [text.rstrip("0123456789") for text in found], [text.rstrip("0123456789") for text in expected]
            assert found == expected


@pytest.mark.parametrize(("places", "virtual", "micro_batches"), [(2, 2, 4), (4, 2, 8), (4, 3, 12), (3, 2, 4), (4, 2, 10), (4, 2, 3)])
def test_interleaved_as_in_torch(places: int, virtual: int, micro_batches: int) -> None:
    schedule = make("interleaved", line(places, virtual), micro_batches)
    stages: Any = [FakeStage(index, 0, places, places * virtual) for index in range(0, places * virtual, places)]
    order = torch_schedules.ScheduleInterleaved1F1B(stages, micro_batches).pipeline_order
    for rank in range(places):
        assert ours(schedule, rank) == computed(order[rank])


@pytest.mark.parametrize(("places", "micro_batches"), [(2, 3), (2, 8), (4, 7), (4, 16), (4, 2), (3, 9)])
def test_zbv_as_in_torch(places: int, micro_batches: int) -> None:
    stages: Any = [FakeStage(index, 0, places, 2 * places) for index in (0, 2 * places - 1)]
    order = torch_schedules.ScheduleZBVZeroBubble(stages, micro_batches).pipeline_order
    schedule = make("zbv", there_and_back(places), micro_batches)
    for rank in range(places):
        assert ours(schedule, rank) == computed(order[rank])


def test_names_are_those_of_plans() -> None:
    assert NAMES == plan.SCHEDULES


def test_bad_requests() -> None:
    with pytest.raises(PlanError, match="did you mean '1f1b'"):
        make("1f1", line(2), 2)
    with pytest.raises(PlanError, match="zbv needs a chain of two stages on each group"):
        make("zbv", line(2, 2), 2)
    with pytest.raises(PlanError, match="the edge 1 -> 0 does not lead to a later one of 2 stages"):
        make("1f1b", line(2), 2, [(1, 0)])
    with pytest.raises(PlanError, match="rank 1 has no stage, rank 2 has one"):
        make("1f1b", [[0], [2]], 2)
    with pytest.raises(PlanError, match="expected one or more, each once"):
        make("1f1b", [[0], []], 2)
    with pytest.raises(PlanError, match="micro_batches is 0"):
        make("1f1b", line(2), 0)
    with pytest.raises(PlanError, match="the action is '2X0'"):
        Schedule.parse("rank 0: 2X0")
    with pytest.raises(PlanError, match="no line for rank 0"):
        Schedule.parse("rank 1: 0F0 0B0")
    with pytest.raises(PlanError, match="gives rank 0 again"):
        Schedule.parse("rank 0: 0F0 0B0\nrank 0: 0F0 0B0")
    with pytest.raises(PlanError, match="line 1 of the schedule is '0F0 0B0'"):
        Schedule.parse("0F0 0B0")
    assert replace(Action(2, "SEND_F", 0), micro_batch=3) == Action.parse("2SEND_F3")

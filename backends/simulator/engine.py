"""Discrete-event simulation of a schedule: each rank has one compute stream and a stream for each axis of communication.

Ranks with equal lists do the same at the same time, so one of them stands for all. Nothing is sampled: an action starts when its ranks,
its values and its streams are there, so the order in which ranks are looked at does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from hgc.backends.simulator.timeline import ACTIONS, Axis, Event, Parts, Timeline
from hgc.backends.simulator.work import COMPUTE, OPTIMIZER, SEND, Meeting, Message, Steps, Work
from hgc.errors import PlanError
from hgc.schedule import Action, Schedule
from hgc.schedule.layout import Edge, Layout, layout


@dataclass(eq=False)
class _Lane:
    """Ranks with one list: their clock, the streams of their communication, and where their time went."""

    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    position: int = 0
    now: float = 0.0
    free: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    pending: dict[str, tuple[float, str]] = field(default_factory=dict)  # key -> end, axis
    compute: float = 0.0
    optimizer: float = 0.0
    bubble: float = 0.0
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    total: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    events: list[Event] = field(default_factory=list)

    @property
    def current(self) -> Action | None:
        return self.actions[self.position] if self.position < len(self.actions) else None

    def idle_until(self, time: float) -> None:
        """Wait for other ranks."""
        if time > self.now:
            self.bubble += time - self.now
            self.now = time

    def communicate_until(self, time: float, axis: str) -> None:
        """Wait for communication."""
        if time > self.now:
            self.exposed[axis] += time - self.now
            self.now = time

    def parts(self, step_s: float) -> Parts:
        axes = sorted(self.total.keys() | self.exposed.keys())
        communication = tuple(Axis(axis, self.total[axis], self.exposed[axis]) for axis in axes)
        return Parts(self.compute, self.optimizer, self.bubble + step_s - self.now, communication)


def play(schedule: Schedule, work: Work, edges: Iterable[Edge] | None = None) -> Timeline:
    """One training step of all ranks.

    Args:
        edges: (stage, later stage that reads it), as for ``hgc.schedule.make``.

    Raises:
        PlanError: the schedule gets stuck; ``hgc.schedule.check`` says where.
    """
    wanted = layout(schedule.stages, schedule.micro_batches, edges)
    run = _Run(schedule, wanted, work)
    run.meet(work.begin)
    waiting = list(range(len(run.lanes)))
    while waiting:
        moved = [lane for lane in waiting if run.advance(lane)]
        waiting = [lane for lane in waiting if run.lanes[lane].current is not None]
        if waiting and not moved:
            stuck = run.lanes[waiting[0]]
            raise PlanError(f"rank {stuck.ranks[0]} gets stuck at {stuck.current}; hgc.schedule.check says why")
    run.meet(work.end)
    step_s = max(lane.now for lane in run.lanes)
    return Timeline(
        step_s,
        tuple(lane.ranks for lane in run.lanes),
        tuple(lane.parts(step_s) for lane in run.lanes),
        tuple(tuple(lane.events) for lane in run.lanes),
    )


class _Run:
    def __init__(self, schedule: Schedule, wanted: Layout, work: Work) -> None:
        self.layout, self.work = wanted, work
        self.lanes = [_Lane(ranks, schedule.lists[ranks[0]]) for ranks in schedule.groups]
        hosts = [set(stage) for stage in wanted.ranks]
        self.hosts = [[lane for lane in self.lanes if lane.ranks[0] in stage] for stage in hosts]
        self.before = [wanted.remote(stage, wanted.before[stage]) for stage in wanted.stages]
        self.after = [wanted.remote(stage, wanted.after[stage]) for stage in wanted.stages]
        self._neighbours = ((wanted.before, self.before), (wanted.after, self.after))
        self.arrivals: dict[tuple[Edge, str, int], list[tuple[float, float]]] = defaultdict(list)  # sent, arrived; of each sender

    def advance(self, index: int) -> bool:
        """Go on as far as possible; false if that is nowhere."""
        lane = self.lanes[index]
        begin = lane.position
        while (action := lane.current) is not None:
            if action.kind.startswith("RECV"):  # posted; what needs the value waits for it
                lane.position += 1
            elif action.kind.startswith("SEND"):
                self._send(lane, action)
                lane.position += 1
            elif not self._compute(action):
                break
        return lane.position > begin

    # -- messages -----------------------------------------------------------------------------------------------------------------------

    def _message(self, edge: Edge, way: str) -> Message:
        return self.work.messages.get((edge, way), Message(0.0))

    def _send(self, lane: _Lane, action: Action) -> None:
        way, stage = action.kind[-1], action.stage
        for edge in [(stage, other) for other in self.after[stage]] if way == "F" else [(other, stage) for other in self.before[stage]]:
            message = self._message(edge, way)
            stream = f"{SEND} {stage} to {edge[1] if way == 'F' else edge[0]}"
            begin = max(lane.now, lane.free[stream])
            end = lane.free[stream] = begin + message.seconds
            lane.total[SEND] += message.seconds
            if message.seconds:
                lane.events.append(Event(stream, begin, end, str(action)))
            self.arrivals[edge, way, action.micro_batch].append((lane.now, end))
            if self.work.sends_block:
                lane.communicate_until(end, SEND)

    def _incoming(self, action: Action) -> list[tuple[Edge, str, int]]:
        """What an action needs from other ranks: edge, way, and the stage that sends."""
        return _needed(action, self.before[action.stage], self.after[action.stage])

    def _local(self, action: Action) -> list[tuple[Edge, str, int]]:
        """What it needs from other stages on the same ranks."""
        stage = action.stage
        before, after = (set(every[stage]) - set(remote[stage]) for every, remote in self._neighbours)
        return _needed(action, sorted(before), sorted(after))

    # -- computation --------------------------------------------------------------------------------------------------------------------

    def _compute(self, action: Action) -> bool:
        hosts = self.hosts[action.stage]
        if any(lane.current != action for lane in hosts):
            return False
        incoming = self._incoming(action)
        if any(len(self.arrivals[edge, way, action.micro_batch]) < len(self.hosts[sender]) for edge, way, sender in incoming):
            return False
        for lane in hosts:
            lane.position += 1
            lane.idle_until(max(host.now for host in hosts))
        for edge, way, _ in incoming:
            self._receive(hosts, self.arrivals.pop((edge, way, action.micro_batch)))
        begins = [lane.now for lane in hosts]
        for edge, way, _ in (*incoming, *self._local(action)):
            self._take(hosts, self._message(edge, way).unpack)
        self._take(hosts, self.work.steps(action))
        for lane, begin in zip(hosts, begins, strict=True):
            lane.events.append(Event(ACTIONS, begin, lane.now, str(action)))
        return True

    def _receive(self, lanes: Sequence[_Lane], parts: Sequence[tuple[float, float]]) -> None:
        """Until the last part is sent there is nothing to do (the bubble), until it has arrived the message is exposed."""
        sent, arrived = max(sent for sent, _ in parts), max(end for _, end in parts)
        for lane in lanes:
            lane.idle_until(sent)
            lane.communicate_until(arrived, SEND)

    def _take(self, lanes: Sequence[_Lane], steps: Steps) -> None:
        for step in steps:
            if step.wait:
                for lane in lanes:
                    lane.communicate_until(*lane.pending.pop(step.wait, (0.0, "")))
            elif step.stream in (COMPUTE, OPTIMIZER):
                for lane in lanes:
                    begin = lane.now
                    lane.now += step.seconds
                    if step.stream == COMPUTE:
                        lane.compute += step.seconds
                    else:
                        lane.optimizer += step.seconds
                    lane.events.append(Event(step.stream, begin, lane.now, step.name))
            else:
                self._collective(lanes, step.stream, step.seconds, step.name, step.key)

    def _collective(self, lanes: Sequence[_Lane], axis: str, seconds: float, name: str, key: str) -> None:
        """All start together, each waits for its own stream; who is late makes the others idle."""
        begin = max(max(lane.now, lane.free[axis]) for lane in lanes)
        end = begin + seconds
        for lane in lanes:
            mine = max(lane.now, lane.free[axis])
            lane.free[axis] = end
            lane.total[axis] += seconds
            lane.events.append(Event(axis, begin, end, name))
            if key:
                lane.pending[key] = (end, axis)
                continue
            lane.communicate_until(mine, axis)
            lane.idle_until(begin)
            lane.communicate_until(end, axis)

    def meet(self, meetings: Iterable[Meeting]) -> None:
        for meeting in meetings:
            lanes = [lane for lane in self.lanes if any(lane in self.hosts[stage] for stage in meeting.stages)]
            self._take(lanes, meeting.steps)


def _needed(action: Action, before: Iterable[int], after: Iterable[int]) -> list[tuple[Edge, str, int]]:
    if action.kind == "F":
        return [((other, action.stage), "F", other) for other in before]
    if action.kind in ("B", "I"):
        return [((action.stage, other), "B", other) for other in after]
    return []

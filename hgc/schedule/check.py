"""Proof that a schedule runs to its end: all lists are played with messages that arrive in the order in which they were sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NoReturn

from hgc.errors import PlanError
from hgc.schedule.actions import Action, Schedule
from hgc.schedule.layout import Edge, Layout, layout


def check(schedule: Schedule, edges: Iterable[Edge] | None = None) -> None:
    """Raise :class:`PlanError` naming the rank and the action unless every rank runs to its end.

    ``edges``: (stage, later stage that reads it); default: each stage reads the one before. A message is a queue from each rank of one
    stage to the next stage, without limit; the ranks of a stage compute together. Work that is missing or done twice is refused too.
    Nothing is left in the queues: a stage computes only what it has received, and sends no micro-batch twice.
    """
    _check_work(schedule)
    wanted = layout(schedule.stages, schedule.micro_batches, edges)
    _Run(schedule, wanted).play()


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each stage: the most micro-batches whose forward has run and whose backward has not, that of the weights included."""
    most = [0] * len(schedule.stages)
    for ranks in schedule.groups:
        alive = Counter[int]()
        for action in schedule.lists[ranks[0]]:
            alive[action.stage] += {"F": 1, "B": -1, "W": -1}.get(action.kind, 0)
            most[action.stage] = max(most[action.stage], alive[action.stage])
    return tuple(most)


def _check_work(schedule: Schedule) -> None:
    for ranks in schedule.groups:
        actions = schedule.lists[ranks[0]]
        counts = Counter(actions)
        twice = next((action for action in actions if counts[action] > 1), None)
        if twice is not None:
            raise PlanError(f"rank {ranks[0]} does {twice} {counts[twice]} times; keep it once")
        for stage in sorted({action.stage for action in actions}):
            for batch in range(schedule.micro_batches):
                done = {kind for kind in ("F", "B", "I", "W") if counts[Action(stage, kind, batch)]}
                if done not in ({"F", "B"}, {"F", "I", "W"}):
                    raise PlanError(
                        f"rank {ranks[0]} does {', '.join(sorted(done)) or 'nothing'} with micro-batch {batch} of stage {stage}; "
                        "expected F and B, or F, I and W"
                    )


@dataclass(frozen=True)
class _Wait:
    """Why an action cannot happen, and the group of ranks that would have to go on first (``None``: going on would not help)."""

    why: str
    on: int | None = None


@dataclass
class _Run:
    """``groups`` of ranks with equal lists go through them in step, as their partners are the same."""

    schedule: Schedule
    layout: Layout
    position: list[int] = field(init=False)
    done: set[tuple[int, str, int]] = field(default_factory=set)
    sent: dict[tuple[Edge, str, int], list[int]] = field(default_factory=dict)
    taken: Counter[tuple[Edge, str, int, int]] = field(default_factory=Counter)
    received: set[tuple[int, str, int, int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        groups = self.schedule.groups
        self.position = [0] * len(groups)
        self.lists = [self.schedule.lists[ranks[0]] for ranks in groups]
        self.hosts = [[group for group, ranks in enumerate(groups) if ranks[0] in stage] for stage in map(set, self.layout.ranks)]

    def play(self) -> None:
        waiting = set(range(len(self.lists)))
        while waiting:
            moved = {group for group in waiting if self._advance(group)}
            waiting = {group for group in waiting if self._current(group) is not None}
            if waiting and not moved:
                self._refuse(min(waiting))

    def _refuse(self, group: int) -> NoReturn:
        """Name the rank at the root: follow who waits for whom to the end, or once around a circle."""
        seen: set[int] = set()
        while True:
            seen.add(group)
            action = self._current(group)
            assert action is not None
            wait = next(self._waits(group, action))
            if wait.on is None or wait.on in seen or self._current(wait.on) is None:
                raise PlanError(f"{self._name(group)} is stuck at {action}: {wait.why}")
            group = wait.on

    def _name(self, group: int) -> str:
        return f"rank {self.schedule.groups[group][0]}"

    def _current(self, group: int) -> Action | None:
        actions, position = self.lists[group], self.position[group]
        return actions[position] if position < len(actions) else None

    def _where(self, group: int) -> str:
        current = self._current(group)
        return "has ended" if current is None else f"is at {current}"

    def _advance(self, group: int) -> bool:
        """Go on as far as possible; false if that is nowhere."""
        begin = self.position[group]
        while (action := self._current(group)) is not None and next(self._waits(group, action), None) is None:
            self._do(group, action)
        return self.position[group] > begin

    # -- what an action waits for -------------------------------------------------------------------------------------------------------

    def _waits(self, group: int, action: Action) -> Iterator[_Wait]:
        if not action.is_compute:
            yield from self._message_waits(group, action)
            return
        stage, batch = action.stage, action.micro_batch
        for host in self.hosts[stage]:
            if self._current(host) != action:
                yield _Wait(f"{self._name(host)}, which runs the stage with it, {self._where(host)}", host)
        if action.kind == "F":
            yield from self._inputs(stage, self.layout.before[stage], "F", batch, group)
            return
        first = "I" if action.kind == "W" else "F"
        if (stage, "B" if action.kind == "W" else "F", batch) not in self.done:
            yield _Wait(f"{stage}{first}{batch} stands behind it")
        if action.kind != "W":
            yield from self._inputs(stage, self.layout.after[stage], "B", batch, group)

    def _inputs(self, stage: int, others: tuple[int, ...], way: str, batch: int, group: int) -> Iterator[_Wait]:
        """Values from other ranks have to be received, those of the same ranks computed."""
        if self.layout.remote(stage, others) and (stage, f"RECV_{way}", batch, group) not in self.received:
            yield _Wait(f"{stage}RECV_{way}{batch} does not stand before it")
        for other in others:
            if not self.layout.is_remote((stage, other)) and (other, way, batch) not in self.done:
                yield _Wait(f"it needs {other}{way}{batch}, which stands behind it")

    def _message_waits(self, group: int, action: Action) -> Iterator[_Wait]:
        stage, batch, way = action.stage, action.micro_batch, action.kind[-1]
        if not self._edges(action):
            yield _Wait(f"stage {stage} has no {'reader' if action.kind in ('SEND_F', 'RECV_B') else 'source'} on other ranks")
        if action.kind.startswith("SEND"):
            if (stage, way, batch) not in self.done:
                yield _Wait(f"{stage}{way}{batch} stands behind it")
            return
        for edge, other in self._edges(action):
            for sender in self.hosts[other]:
                sent, position = self.sent.get((edge, way, sender), []), self.taken[edge, way, sender, group]
                if position >= len(sent):
                    yield _Wait(f"{self._name(sender)} has not sent {other}SEND_{way}{batch} and {self._where(sender)}", sender)
                elif sent[position] != batch:
                    yield _Wait(f"{self._name(sender)} sends {other}SEND_{way}{sent[position]} first; receive in the order of the sends")

    def _edges(self, action: Action) -> list[tuple[Edge, int]]:
        """Edges on which a message of this kind travels, and the stage at the other end."""
        stage = action.stage
        if action.kind in ("SEND_F", "RECV_B"):
            return [((stage, other), other) for other in self.layout.remote(stage, self.layout.after[stage])]
        return [((other, stage), other) for other in self.layout.remote(stage, self.layout.before[stage])]

    # -- what an action changes ---------------------------------------------------------------------------------------------------------

    def _do(self, group: int, action: Action) -> None:
        stage, batch, way = action.stage, action.micro_batch, action.kind[-1]
        if action.is_compute:
            for host in self.hosts[stage]:
                self.position[host] += 1
            self.done.add((stage, "B" if action.kind == "I" else action.kind, batch))
            return
        self.position[group] += 1
        if action.kind.startswith("SEND"):
            for edge, _ in self._edges(action):
                self.sent.setdefault((edge, way, group), []).append(batch)
            return
        for edge, other in self._edges(action):
            for sender in self.hosts[other]:
                self.taken[edge, way, sender, group] += 1
        self.received.add((stage, action.kind, batch, group))

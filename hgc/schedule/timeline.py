"""List scheduling on a clock of unit times: at every moment each free place starts the best action that is ready.

The result is an order that happened, so ranks that follow it never wait for one another in a circle.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from hgc.schedule.actions import Action
from hgc.schedule.layout import Layout

UNITS = {"F": 1, "B": 2}


@dataclass
class Progress:
    """How many micro-batches each stage has started and ended, forward and backward."""

    stages: int
    started: dict[str, list[int]] = field(init=False)
    ended: dict[str, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.started = {kind: [0] * self.stages for kind in "FB"}
        self.ended = {kind: [0] * self.stages for kind in "FB"}

    def ahead(self, stage: int) -> int:
        """Forwards that have started and whose backward has not ended."""
        return self.started["F"][stage] - self.ended["B"][stage]


@dataclass(frozen=True)
class Policy:
    """``allows(stage, progress)``: may the stage start a forward; lifted where all would wait for ever. ``priority``: the lowest first."""

    allows: Callable[[int, Progress], bool]
    priority: Callable[[Action], tuple[int, ...]]


def orders(layout: Layout, policy: Policy) -> list[list[Action]]:
    """What each place computes, in order."""
    found: list[list[Action]] = [[] for _ in layout.places]
    for action in _started(layout, policy):
        for place in layout.places_of[action.stage]:
            found[place].append(action)
    return found


def _started(layout: Layout, policy: Policy) -> Iterator[Action]:
    progress = Progress(len(layout.stages))
    running: list[tuple[int, int, Action]] = []
    busy: set[int] = set()
    now = count = 0
    while True:
        chosen = _choose(layout, policy, progress, busy, strict=True)
        if not chosen and not running:
            chosen = _choose(layout, policy, progress, busy, strict=False)[:1]
            if not chosen:
                return
        for action in chosen:
            count += 1
            heapq.heappush(running, (now + UNITS[action.kind], count, action))
            busy.update(layout.places_of[action.stage])
            progress.started[action.kind][action.stage] += 1
            yield action
        now = running[0][0]
        while running and running[0][0] == now:
            action = heapq.heappop(running)[2]
            busy.difference_update(layout.places_of[action.stage])
            progress.ended[action.kind][action.stage] += 1


def _choose(layout: Layout, policy: Policy, progress: Progress, busy: set[int], *, strict: bool) -> list[Action]:
    """What starts now: in order of priority, each if its places are still free."""
    free = [stage for stage in layout.stages if busy.isdisjoint(layout.places_of[stage])]
    ready = [action for stage in free for action in _ready(layout, policy, progress, stage, strict)]
    taken: set[int] = set()
    chosen = []
    for action in sorted(ready, key=policy.priority):
        if taken.isdisjoint(layout.places_of[action.stage]):
            taken.update(layout.places_of[action.stage])
            chosen.append(action)
    return chosen


def _ready(layout: Layout, policy: Policy, progress: Progress, stage: int, strict: bool) -> Iterator[Action]:
    started, ended = progress.started, progress.ended
    forward, backward = started["F"][stage], started["B"][stage]
    arrived = all(ended["F"][other] > forward for other in layout.before[stage])
    if forward < layout.micro_batches and arrived and (not strict or policy.allows(stage, progress)):
        yield Action(stage, "F", forward)
    if backward < ended["F"][stage] and all(ended["B"][other] > backward for other in layout.after[stage]):
        yield Action(stage, "B", backward)

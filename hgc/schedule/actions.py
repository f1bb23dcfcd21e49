"""``Action``: one thing that a rank does with one micro-batch of one stage. ``Schedule``: what each rank does, in order."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

from hgc.errors import PlanError

Kind = Literal["F", "B", "I", "W", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]
"""Forward; backward, whole (``B``) or first for the inputs (``I``), later for the weights (``W``); messages of forward and backward."""

COMPUTE = ("F", "B", "I", "W")
_TEXT = re.compile(r"(\d+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)(\d+)")


@dataclass(frozen=True, slots=True)
class Action:
    """``str`` and :meth:`parse` use the notation of torch.distributed.pipelining: stage, kind, micro-batch, as in ``2SEND_F0``.

    ``SEND_F`` sends the stage's results to every stage that reads them on other ranks, ``RECV_F`` gets the stage's inputs from all of
    them; ``SEND_B`` and ``RECV_B`` do so with gradients, against the edges. A stage on the same ranks is handed the value itself.
    """

    stage: int
    kind: Kind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    @staticmethod
    def parse(text: str) -> Action:
        """Inverse of ``str``; raises :class:`PlanError` for anything else."""
        match = _TEXT.fullmatch(text)
        if match is None:
            raise PlanError(
                f"the action is {text!r}; expected stage, one of {', '.join(get_args(Kind))}, and micro-batch, as in '2SEND_F0'"
            )
        return Action(int(match[1]), match[2], int(match[3]))  # type: ignore[arg-type]  # the pattern allows kinds only


@dataclass(frozen=True)
class Schedule:
    """``lists[rank]`` are the actions of a rank in order; ranks that do the same share one tuple."""

    lists: tuple[tuple[Action, ...], ...]

    @property
    def devices(self) -> int:
        return len(self.lists)

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that share one list, in the order of their first."""
        found: dict[tuple[Action, ...], list[int]] = {}
        by_identity: dict[int, list[int]] = {}
        for rank, actions in enumerate(self.lists):
            ranks = by_identity.get(id(actions))
            if ranks is None:  # equality of long lists is looked at once for each object
                ranks = by_identity[id(actions)] = found.setdefault(actions, [])
            ranks.append(rank)
        return tuple(tuple(ranks) for ranks in found.values())

    @cached_property
    def stages(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each stage: those that run its forward."""
        hosts: dict[int, set[int]] = {}
        for ranks in self.groups:
            for stage in {action.stage for action in self.lists[ranks[0]] if action.is_compute}:
                hosts.setdefault(stage, set()).update(ranks)
        return tuple(tuple(sorted(hosts.get(stage, ()))) for stage in range(max(hosts, default=-1) + 1))

    @cached_property
    def micro_batches(self) -> int:
        return max((action.micro_batch + 1 for ranks in self.groups for action in self.lists[ranks[0]]), default=0)

    def __iter__(self) -> Iterator[tuple[Action, ...]]:
        return iter(self.lists)

    def __str__(self) -> str:
        """One line for each list: ``ranks 0-3: 0F0 0SEND_F0 ...``."""
        return "\n".join(_line(ranks, self.lists[ranks[0]]) for ranks in self.groups)

    @staticmethod
    def parse(text: str) -> Schedule:
        """Inverse of ``str``; raises :class:`PlanError` naming the first line that is wrong."""
        lists: dict[int, tuple[Action, ...]] = {}
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            head, colon, tail = line.partition(":")
            ranks = _parse_ranks(head.split()[-1]) if colon and re.fullmatch(r"\s*ranks? [\d,-]+\s*", head) else []
            if not ranks:
                raise PlanError(
                    f"line {number} of the schedule is {line[:40]!r}; expected ranks and actions, as in 'ranks 0-3: 0F0 0SEND_F0'"
                )
            actions = tuple(Action.parse(word) for word in tail.split())
            for rank in ranks:
                if rank in lists:
                    raise PlanError(f"line {number} of the schedule gives rank {rank} again; keep one line for each rank")
                lists[rank] = actions
        missing = sorted(set(range(len(lists))) - set(lists))
        if missing or not lists:
            raise PlanError(f"the schedule has no line for rank {(missing or [0])[0]}; ranks are numbered from 0 without gaps")
        return Schedule(tuple(lists[rank] for rank in range(len(lists))))


def shown_ranks(ranks: Iterable[int]) -> str:
    """``0-3,8``: ranks in order, runs joined."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _line(ranks: tuple[int, ...], actions: tuple[Action, ...]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)}: {' '.join(map(str, actions))}".rstrip()


def _parse_ranks(text: str) -> list[int]:
    ranks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None:
            return []
        ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
    return ranks

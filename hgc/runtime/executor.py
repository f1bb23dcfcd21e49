"""Play a schedule: stages compute, values pass between them; who talks to whom is in the links, when is in the schedule.

A stage is anything that computes results from received values and, later, gradients of what it received from gradients of
its results. Stages may be on any ranks, and on unlike meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from hgc.runtime.executor_messages import Link, Message, Post, Routes, Shape, Way
from hgc.runtime.executor_transport import Transport
from hgc.schedule import Action, Schedule, check


class Worker(Protocol):
    """One stage on this rank. Values are this rank's parts, by name."""

    def forward(self, micro_batch: int, received: dict[str, Tensor]) -> dict[str, Tensor]:
        """Results by name; they may have history."""
        ...

    def backward(self, micro_batch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Gradients of the received values, from those of the results; gradients of parameters are added up."""
        ...

    def backward_inputs(self, micro_batch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """The first half of ``backward``: what other stages wait for."""
        ...

    def backward_weights(self, micro_batch: int) -> None:
        """The second half."""
        ...


class Executor:
    """One rank's part of a schedule.

    Raises :class:`~hgc.errors.PlanError`, before anything is sent, for a schedule that does not run to its end.
    """

    around: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """What each action runs in, given its text; a trace looks in here."""

    def __init__(self, schedule: Schedule, links: Sequence[Link], rank: int, transport: Transport, device: torch.device) -> None:
        check(schedule, sorted({(link.maker, link.reader) for link in links}))
        self._schedules = {True: schedule, False: _forwards(schedule)}
        self._links, self._rank = tuple(links), rank
        self._transport, self._device = transport, device
        self._routes: dict[tuple[bool, tuple[tuple[str, Shape], ...]], Routes] = {}

    def run(self, workers: Mapping[int, Worker], shapes: Mapping[str, Shape], trains: bool = True) -> None:
        """Every action of this rank, in order; ``shapes`` are those of the values that pass in one micro-batch. Without ``trains``
        forwards only."""
        key = trains, tuple(shapes.items())
        if key not in self._routes:
            self._routes[key] = Routes(self._schedules[trains], self._links, shapes, self._rank)
        step = _Step(workers, self._links, Post(self._routes[key], self._transport, self._device))
        for action in self._schedules[trains].lists[self._rank]:
            with self.around(str(action)):
                step.play(action)
        step.post.finish()


def _forwards(schedule: Schedule) -> Schedule:
    """The same order without backwards; what it waits for is a part of what the whole waits for."""
    kept = ("F", "SEND_F", "RECV_F")
    return Schedule(tuple(tuple(action for action in actions if action.kind in kept) for actions in schedule.lists))


class _Step:
    def __init__(self, workers: Mapping[int, Worker], links: Sequence[Link], post: Post) -> None:
        self.workers, self.post = workers, post
        self.reads: dict[int, list[Link]] = {stage: [link for link in links if link.reader == stage] for stage in workers}
        self.makes: dict[int, list[Link]] = {stage: [link for link in links if link.maker == stage] for stage in workers}
        self.arrived: dict[tuple[Link, Way, int], Tensor] = {}
        self.leaving: dict[tuple[Link, Way, int], Tensor] = {}
        self.plays: dict[str, Callable[[int, int], None]] = {
            "F": self._forward,
            "B": self._backward,
            "I": self._backward_inputs,
            "W": lambda stage, batch: self.workers[stage].backward_weights(batch),
            "RECV_F": lambda stage, batch: self._receive(self.reads[stage], "F", batch, local=False),
            "RECV_B": lambda stage, batch: self._receive(self.makes[stage], "B", batch, local=False),
            "SEND_F": lambda stage, batch: self._send(self.makes[stage], "F", batch, local=False),
            "SEND_B": lambda stage, batch: self._send(self.reads[stage], "B", batch, local=False),
        }

    def play(self, action: Action) -> None:
        self.plays[action.kind](action.stage, action.micro_batch)

    def _forward(self, stage: int, batch: int) -> None:
        self._receive(self.reads[stage], "F", batch, local=True)
        received = {link.value: self.arrived.pop((link, "F", batch)) for link in self.reads[stage]}
        results = self.workers[stage].forward(batch, received)
        for link in self.makes[stage]:
            self.leaving[link, "F", batch] = results[link.value].detach()
        self._send(self.makes[stage], "F", batch, local=True)

    def _backward(self, stage: int, batch: int) -> None:
        self._hand_back(stage, batch, self.workers[stage].backward(batch, self._gradients(stage, batch)))

    def _backward_inputs(self, stage: int, batch: int) -> None:
        self._hand_back(stage, batch, self.workers[stage].backward_inputs(batch, self._gradients(stage, batch)))

    def _gradients(self, stage: int, batch: int) -> dict[str, Tensor]:
        """Of the stage's results: the sum over all that read them, in the order of the readers."""
        self._receive(self.makes[stage], "B", batch, local=True)
        found: dict[str, Tensor] = {}
        for link in self.makes[stage]:
            if link.gradient:
                arrived = self.arrived.pop((link, "B", batch))
                found[link.value] = found[link.value] + arrived if link.value in found else arrived
        return found

    def _hand_back(self, stage: int, batch: int, gradients: Mapping[str, Tensor]) -> None:
        for link in self.reads[stage]:
            if link.gradient:
                self.leaving[link, "B", batch] = gradients[link.value]
        self._send(self.reads[stage], "B", batch, local=True)

    def _send(self, links: Sequence[Link], way: Way, batch: int, local: bool) -> None:
        for link in links:
            if link.is_local == local and (way == "F" or link.gradient):
                self.post.send(Message(link, way, batch), self.leaving.pop((link, way, batch)))

    def _receive(self, links: Sequence[Link], way: Way, batch: int, local: bool) -> None:
        for link in links:
            if link.is_local == local and (way == "F" or link.gradient):
                self.arrived[link, way, batch] = self.post.receive(Message(link, way, batch))

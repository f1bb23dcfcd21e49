"""What an action costs, in plain seconds: the engine's input, which knows neither models nor clusters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from hgc.schedule import Action
from hgc.schedule.layout import Edge

COMPUTE, OPTIMIZER = "compute", "optimizer"
"""Streams of work on the device itself, which are one; every other stream carries communication and is named after its axis."""

SEND = "pp"
"""The axis, in reports, of messages between stages; each direction between two stages is a stream."""


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of an action.

    On ``stream`` ``"compute"`` or ``"optimizer"`` the device is busy for ``seconds``. On any other one a collective runs, which starts as
    soon as the device gets here, the stream is free and the other ranks are here too; the device waits for its end, unless ``key`` is
    given: then it goes on, and a later step with ``wait`` (and no seconds) waits for it. A key that was not started needs no waiting.
    ``collective`` and ``payload_bytes`` say what runs, for counts of bytes; times do not depend on them.
    """

    seconds: float = 0.0
    stream: str = COMPUTE
    name: str = ""
    key: str = ""
    wait: str = ""
    collective: str = ""
    payload_bytes: float = 0.0


Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Message:
    """One way over an edge: ``seconds`` on the way, after which the device of each receiving rank spends ``unpack`` (steps).

    ``between_nodes_bytes``: what leaves nodes, of all ranks together.
    """

    seconds: float
    unpack: Steps = ()
    between_nodes_bytes: float = 0.0


@dataclass(frozen=True)
class Meeting:
    """Steps at the beginning or end of the training step that the ranks of ``stages`` take together; bytes that leave nodes in them."""

    stages: tuple[int, ...]
    steps: Steps
    between_nodes_bytes: float = 0.0


@dataclass(frozen=True)
class Work:
    """All costs of one training step.

    ``steps(action)``: of forward and backward actions. ``messages``: edge and ``"F"`` or ``"B"`` -> what travels there. ``end``: what
    follows the last action, in order. ``sends_block``: the device of the sender waits until a message has arrived.
    """

    steps: Callable[[Action], Steps]
    messages: Mapping[tuple[Edge, str], Message] = field(default_factory=dict)
    end: tuple[Meeting, ...] = ()
    sends_block: bool = False
    begin: tuple[Meeting, ...] = ()

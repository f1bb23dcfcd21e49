"""The messages of a step: which ones a rank sends and receives, in which order, and how a value is put together from them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hgc.runtime.executor_exchange import Side, Transfer, exchange, local_shape
from hgc.runtime.executor_transport import Handle, Transport, wait
from hgc.schedule import Action, Schedule

Way = Literal["F", "B"]
_AHEAD = 2
"""Receives posted before they are needed, for each sender: enough that a message can travel while a stage computes."""


@dataclass(frozen=True, eq=False)
class Link:
    """A value on its way between two stages: who makes it, who reads it, where it lives on both sides; ``gradient``: does one come back."""

    value: str
    maker: int
    reader: int
    source: Side
    target: Side
    gradient: bool = True

    @property
    def is_local(self) -> bool:
        """On the same ranks; then no action of the schedule stands for it, and it goes on as soon as it is there."""
        return (self.source.first_rank, self.source.devices) == (self.target.first_rank, self.target.devices)


@dataclass(frozen=True)
class Message:
    """Names what one rank sends to another of one link, for one micro-batch."""

    link: Link
    way: Way
    micro_batch: int

    def __str__(self) -> str:
        a, b = (self.link.maker, self.link.reader) if self.way == "F" else (self.link.reader, self.link.maker)
        what = "" if self.way == "F" else "gradient of "
        return f"{what}{self.link.value!r} (micro-batch {self.micro_batch}, stage {a} to {b})"


@dataclass(frozen=True)
class Shape:
    """Global shape and dtype of what a link carries in a micro-batch."""

    sizes: tuple[int, ...]
    dtype: torch.dtype


class Routes:
    """Transfers of every link for given shapes, and the order in which each rank sends."""

    def __init__(self, schedule: Schedule, links: Sequence[Link], shapes: Mapping[str, Shape], rank: int) -> None:
        self.rank, self.shapes = rank, shapes
        self.leaving = departures(links)
        self.transfers: dict[tuple[Link, Way], tuple[Transfer, ...]] = {}
        for link in links:
            sizes = shapes[link.value].sizes
            self.transfers[link, "F"] = exchange(link.source, link.target, sizes)
            if link.gradient:
                self.transfers[link, "B"] = exchange(link.target, link.source, sizes, gradient=True)
        mine = {transfer.source for found in self.transfers.values() for transfer in found if transfer.target == rank} - {rank}
        self.incoming = {source: list(self._sent(schedule.lists[source], source)) for source in sorted(mine)}

    def _sent(self, actions: Iterable[Action], source: int) -> Iterator[Message]:
        """What ``source`` sends to this rank, in its order."""
        to_me = {key for key, found in self.transfers.items() if any((t.source, t.target) == (source, self.rank) for t in found)}
        for action in actions:
            for link, way in self.leaving.get((action.stage, action.kind), ()):
                if (link, way) in to_me:
                    yield Message(link, way, action.micro_batch)

    def sends(self, link: Link, way: Way) -> list[Transfer]:
        return [transfer for transfer in self.transfers[link, way] if transfer.source == self.rank]

    def receives(self, link: Link, way: Way) -> list[Transfer]:
        return [transfer for transfer in self.transfers[link, way] if transfer.target == self.rank]

    def local_shape(self, link: Link, way: Way) -> tuple[int, ...]:
        """Of what arrives on this rank."""
        return local_shape(link.target if way == "F" else link.source, self.shapes[link.value].sizes)


def departures(links: Sequence[Link]) -> dict[tuple[int, str], list[tuple[Link, Way]]]:
    """(stage, kind of action) -> the links on which it sends, and which way: computing hands on to the same ranks, sends go to others."""
    found: dict[tuple[int, str], list[tuple[Link, Way]]] = {}
    for link in links:
        found.setdefault((link.maker, "F" if link.is_local else "SEND_F"), []).append((link, "F"))
        if link.gradient:
            for kind in ("B", "I") if link.is_local else ("SEND_B",):
                found.setdefault((link.reader, kind), []).append((link, "B"))
    return found


class Post:
    """One rank's messages of one step: sends at once, receives in the senders' order."""

    def __init__(self, routes: Routes, transport: Transport, device: torch.device) -> None:
        self._routes, self._transport, self._device = routes, transport, device
        self._sending: deque[tuple[Handle, Tensor, int]] = deque()
        self._inboxes = {source: _Inbox(source, order, self._receive) for source, order in routes.incoming.items()}
        self._own: dict[Message, Tensor] = {}

    def send(self, message: Message, local: Tensor) -> None:
        """This rank's part of a value to all who need some of it."""
        for transfer in self._routes.sends(message.link, message.way):
            packed = pack(local, transfer)
            if transfer.target == self._routes.rank:
                self._own[message] = packed
            else:
                self._sending.append((self._transport.send(packed, transfer.target), packed, transfer.target))
        while self._sending and self._sending[0][0].is_completed():
            self._sending.popleft()

    def receive(self, message: Message) -> Tensor:
        """This rank's part of a value; waits for its messages. Parts that nobody sends are zero."""
        transfers = self._routes.receives(message.link, message.way)
        shape, dtype = self._routes.local_shape(message.link, message.way), self._routes.shapes[message.link.value].dtype
        arrived = [(transfer, self._arrived(message, transfer)) for transfer in transfers]
        if len(arrived) == 1 and _covers(transfers[0], shape):
            return arrived[0][1].view(shape)
        local = torch.zeros(shape, dtype=dtype, device=self._device)
        for transfer, packed in arrived:
            unpack(packed, transfer, local)
        return local

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        while self._sending:
            handle, _, target = self._sending.popleft()
            wait(handle, "a message to", target)
        assert all(inbox.read == len(inbox.order) for inbox in self._inboxes.values()), "a message was sent and never read"

    def _arrived(self, message: Message, transfer: Transfer) -> Tensor:
        if transfer.source == self._routes.rank:
            return self._own.pop(message)
        return self._inboxes[transfer.source].take(message)

    def _receive(self, message: Message, source: int) -> tuple[Handle, Tensor]:
        (transfer,) = (t for t in self._routes.receives(message.link, message.way) if t.source == source)
        buffer = torch.empty(transfer.numel, dtype=self._routes.shapes[message.link.value].dtype, device=self._device)
        return self._transport.receive(buffer, source), buffer


class _Inbox:
    """Messages of one sender, received in its order, whatever the order in which they are asked for."""

    def __init__(self, source: int, order: list[Message], post: Callable[[Message, int], tuple[Handle, Tensor]]) -> None:
        self.source, self.order, self._post = source, order, post
        self._number = {message: number for number, message in enumerate(order)}
        self._posted: list[tuple[Handle, Tensor] | None] = []
        self.read = 0
        self._post_up_to(_AHEAD)

    def _post_up_to(self, count: int) -> None:
        while len(self._posted) < min(count, len(self.order)):
            self._posted.append(self._post(self.order[len(self._posted)], self.source))

    def take(self, message: Message) -> Tensor:
        number = self._number[message]
        self._post_up_to(number + 1 + _AHEAD)
        found = self._posted[number]
        assert found is not None, f"{message} is read twice"
        self._posted[number] = None
        self.read += 1
        wait(found[0], f"the message {message} from", self.source)
        return found[1]


def _covers(transfer: Transfer, shape: tuple[int, ...]) -> bool:
    """Is it one piece, the receiver's whole part, in its order?"""
    return len(transfer.pieces) == 1 and transfer.pieces[0][1].size == shape


def pack(local: Tensor, transfer: Transfer) -> Tensor:
    """The pieces one after the other, flat."""
    pieces = [region.of(local).reshape(-1) for region, _ in transfer.pieces]
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces)


def unpack(packed: Tensor, transfer: Transfer, local: Tensor) -> None:
    position = 0
    for _, region in transfer.pieces:
        region.of(local).copy_(packed[position : position + region.numel].view(region.size))
        position += region.numel

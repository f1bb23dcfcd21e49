"""How messages travel between two ranks: through torch.distributed, or through the memory of one process whose threads are ranks."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor

from hgc.errors import HgcError


class Handle(Protocol):
    """A message under way."""

    def wait(self) -> object: ...

    def is_completed(self) -> bool: ...


class Transport(Protocol):
    """Messages of one rank to another arrive in the order in which they were sent. Neither call waits."""

    def send(self, tensor: Tensor, to: int) -> Handle:
        """The tensor must stay as it is until the handle is completed."""
        ...

    def receive(self, tensor: Tensor, source: int) -> Handle:
        """The tensor is filled when ``wait`` of the handle returns."""
        ...


class MessageError(HgcError):
    """A message did not come through: the rank at its other end has ended, or the network has failed."""


def wait(handle: Handle, what: str, other: int) -> None:
    """Wait for a message; raises :class:`MessageError` naming it and the other rank."""
    try:
        handle.wait()
    except RuntimeError as error:
        reason = re.sub(r"^\[[^\]]*\]\s*", "", str(error).strip()).partition(". ")[0][:200]  # without the place in gloo's source
        raise MessageError(f"{what} rank {other} failed ({reason}); if that rank has ended, its own output says why") from error


class Distributed:
    """Sends and receives of torch.distributed; all ranks of the job must make it at the same time.

    Two groups, for messages to higher and to lower ranks: NCCL carries out the operations of a group of two in one order, so that two
    ranks that each send before they receive would wait for one another in a single group.
    """

    def __init__(self) -> None:
        self._rank = dist.get_rank()
        everyone = list(range(dist.get_world_size()))
        self._up, self._down = dist.new_group(everyone), dist.new_group(everyone)

    def send(self, tensor: Tensor, to: int) -> Handle:
        work = dist.isend(tensor, to, group=self._up if to > self._rank else self._down)
        assert work is not None
        return work

    def receive(self, tensor: Tensor, source: int) -> Handle:
        work = dist.irecv(tensor, source, group=self._up if source < self._rank else self._down)
        assert work is not None
        return work


class _Chosen(threading.local):
    def __init__(self) -> None:
        self.transport: Transport | None = None


_chosen = _Chosen()


@contextmanager
def use(transport: Transport) -> Iterator[None]:
    """Let what this thread starts send its messages so, for ranks that are threads."""
    before, _chosen.transport = _chosen.transport, transport
    try:
        yield
    finally:
        _chosen.transport = before


def open_transport() -> Transport:
    """What :func:`use` says, else torch.distributed; all ranks must call it at the same time."""
    return _chosen.transport or Distributed()


@dataclass
class Mailboxes:
    """What the threads of a process share: a queue for each pair of ranks, and word of a rank that has failed."""

    timeout_s: float = 60.0
    changed: threading.Condition = field(default_factory=threading.Condition)
    sent: defaultdict[tuple[int, int], list[Tensor | None]] = field(default_factory=lambda: defaultdict(list))
    closed: bool = False

    def close(self) -> None:
        """A rank has failed: the others wait no longer, and end."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def of(self, rank: int) -> Mailbox:
        """The transport of one rank."""
        return Mailbox(self, rank)


class Mailbox:
    """One rank's end of :class:`Mailboxes`."""

    def __init__(self, shared: Mailboxes, rank: int) -> None:
        self._shared, self._rank = shared, rank
        self._received: defaultdict[int, int] = defaultdict(int)

    def send(self, tensor: Tensor, to: int) -> Handle:
        with self._shared.changed:
            self._shared.sent[self._rank, to].append(tensor.detach().clone())
            self._shared.changed.notify_all()
        return _Done()

    def receive(self, tensor: Tensor, source: int) -> Handle:
        self._received[source] += 1
        return _Awaited(self._shared, (source, self._rank), self._received[source] - 1, tensor)


class _Done:
    def wait(self) -> object:
        return None

    def is_completed(self) -> bool:
        return True


@dataclass
class _Awaited:
    shared: Mailboxes
    pair: tuple[int, int]
    number: int
    tensor: Tensor

    def is_completed(self) -> bool:
        return len(self.shared.sent[self.pair]) > self.number

    def wait(self) -> object:
        with self.shared.changed:
            arrived = self.shared.changed.wait_for(lambda: self.shared.closed or self.is_completed(), self.shared.timeout_s)
            if self.shared.closed:
                raise SystemExit("another rank has failed")
            if not arrived:
                raise TimeoutError(
                    f"rank {self.pair[1]} waited {self.shared.timeout_s:.0f} s for message {self.number} of rank {self.pair[0]}"
                )
            queue = self.shared.sent[self.pair]
            message, queue[self.number] = queue[self.number], None
        assert message is not None
        if message.shape != self.tensor.shape or message.dtype != self.tensor.dtype:
            raise ValueError(
                f"rank {self.pair[1]} expected {self.tensor.dtype} {tuple(self.tensor.shape)} from rank {self.pair[0]}, "
                f"which sent {message.dtype} {tuple(message.shape)}"
            )
        self.tensor.copy_(message)
        return None

"""Notes what one rank does in a step: the block it computes, the action it is in, and what it sends from start to end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hgc.runtime.tracing_clock import Clock, Moment
from hgc.schedule import Action
from hgc.traces import ACTIONS, COMPUTE, OPTIMIZER

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "broadcast": "broadcast",
}
"""torch's names -> the names of costs and simulations."""


@dataclass(frozen=True)
class Span:
    """Something on a row, in seconds from the start of the step."""

    row: str
    begin_s: float
    end_s: float
    name: str


@dataclass
class _Sent:
    """A collective or message. ``exact``: its end is its own, not the moment at which somebody waited for it."""

    row: str
    name: str
    begin: Moment
    end: Moment | None = None
    exact: bool = False


class Recorder:
    """One rank's notes. ``rows``: name of a process group -> row; ``message_row(action, peer)`` names the row of a message to a rank."""

    def __init__(self, clock: Clock, rows: Mapping[str, str], message_row: Callable[[Action, int], str]) -> None:
        self._clock, self._rows, self._message_row = clock, rows, message_row
        self._doing: list[tuple[str, str] | None] = [None]  # row and name; the last one is what computes now
        self._marks: list[tuple[Moment, tuple[str, str] | None]] = []
        self._actions: list[tuple[str, Moment, Moment]] = []
        self._sent: list[_Sent] = []
        self._open: dict[int, _Sent] = {}  # by the memory of the result
        self._action: Action | None = None
        self._unit = ""
        self._buckets = 0

    # -- computation --------------------------------------------------------------------------------------------------------------------

    def begins(self, name: str, row: str = COMPUTE) -> None:
        """A block's forward, or the optimizer."""
        self._doing.append((row, name))
        self._mark()

    def ends(self) -> None:
        self._doing.pop()
        self._mark()

    def backward_of(self, name: str) -> None:
        """The gradient of a block's result is there, so that its backward begins; it lasts until that of the next, or the action's end."""
        if self._doing[-1] != (COMPUTE, name):
            self._doing[-1] = COMPUTE, name
            self._mark()

    @contextmanager
    def action(self, text: str) -> Iterator[None]:
        self._action = Action.parse(text)
        self._doing.append(None)
        begin = self._mark()
        try:
            yield
        finally:
            self._doing.pop()
            end = self._mark()
            if self._action.is_compute:
                self._actions.append((text, begin, end))
            self._action = None

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """The device stands still meanwhile, unless this is another stream than its computation's."""
        if not self._clock.on_compute_stream():
            yield
            return
        self._doing.append(None)
        self._mark()
        try:
            yield
        finally:
            self.ends()

    def _mark(self) -> Moment:
        moment = self._clock.now()
        self._marks.append((moment, self._doing[-1]))
        return moment

    # -- communication ------------------------------------------------------------------------------------------------------------------

    @contextmanager
    def moving(self, what: str) -> Iterator[None]:
        """The next collective gathers or scatters a unit of FSDP2, ``"gather model.layers.0"``."""
        before, self._unit = self._unit, what
        try:
            yield
        finally:
            self._unit = before

    def functional(self, name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """An operator that starts a collective (its last argument names the group), or ``wait_tensor``, where it ends."""
        if name == "wait_tensor":
            with self._waiting():
                result = call(*args)
            sent = self._open.pop(args[0].data_ptr(), None)
            if sent is not None:
                sent.end = self._clock.now()
            return result
        sent = self._starts(COLLECTIVES[name], str(args[-1]))
        result = call(*args)
        assert isinstance(result, Tensor)
        self._open[result.data_ptr()] = sent
        return result

    def distributed(self, name: str, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function of torch.distributed; an asynchronous one returns work that knows when it is done."""
        if name == "irecv":
            return _Watched(call(*args, **kwargs), self._waiting, lambda: None)  # shown by the rank that sends
        if name == "isend":
            action = self._action or Action(0, "SEND_F", 0)
            sent = _Sent(self._message_row(action, args[1]), str(self._action or "tied gradient"), self._clock.now())
            self._sent.append(sent)
            return _Watched(call(*args, **kwargs), self._waiting, lambda: self._done(sent))
        group: Any = kwargs.get("group") or dist.group.WORLD
        sent = self._starts(COLLECTIVES[name], str(group.group_name), asynchronous=bool(kwargs.get("async_op")))
        if not kwargs.get("async_op"):
            with self._waiting():
                result = call(*args, **kwargs)
            self._done(sent, exact=True)
            return result
        work = call(*args, **kwargs)
        # called when the collective is done: by gloo's thread, or on CUDA at once, on a stream that waits for it
        work.get_future().add_done_callback(lambda _: self._done(sent, exact=True))
        return _Watched(work, self._waiting, lambda: self._done(sent))

    def _starts(self, kind: str, group: str, asynchronous: bool = False) -> _Sent:
        doing = self._doing[-1]
        name = self._unit or (f"{kind} {doing[1]}" if doing is not None else kind)
        if asynchronous and kind == "all_reduce":
            name, self._buckets = f"bucket {self._buckets}", self._buckets + 1
        sent = _Sent(self._rows[group], name, self._clock.now())
        self._sent.append(sent)
        return sent

    def _done(self, sent: _Sent, exact: bool = False) -> None:
        if sent.end is None:
            sent.end, sent.exact = self._clock.now(), exact

    # -- afterwards ---------------------------------------------------------------------------------------------------------------------

    def spans(self) -> list[Span]:
        """Everything noted so far, each row in order and without overlaps; waits for the device."""
        last = self._clock.now()
        self._clock.settle()
        seconds = self._clock.seconds
        found = [Span(ACTIONS, seconds(begin), seconds(end), text) for text, begin, end in self._actions]
        for (begin, doing), (end, _) in zip(self._marks, [*self._marks[1:], (last, None)], strict=True):
            if doing is not None:
                found.append(Span(doing[0], seconds(begin), seconds(end), doing[1]))
        sent = [
            (Span(each.row, seconds(each.begin), seconds(last if each.end is None else each.end), each.name), each.exact)
            for each in self._sent
        ]
        return [*_joined(found), *side_by_side(in_turn(sent) if self._clock.serial else (span for span, _ in sent))]


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Neighbours of one name that touch, as one; empty ones left out."""
    held: Span | None = None
    for span in spans:
        if held is not None and (held.row, held.name, held.end_s) == (span.row, span.name, span.begin_s):
            held = replace(held, end_s=span.end_s)
            continue
        if held is not None and held.end_s > held.begin_s:
            yield held
        held = span
    if held is not None and held.end_s > held.begin_s:
        yield held


def in_turn(sent: Iterable[tuple[Span, bool]]) -> Iterator[Span]:
    """A span whose end is exact begins when the one before it on its row is through, not when it was asked for."""
    through: dict[str, float] = {}
    for span, exact in sent:
        if exact:
            span = replace(span, begin_s=min(max(span.begin_s, through.get(span.row, span.begin_s)), span.end_s))
            through[span.row] = span.end_s
        yield span


def side_by_side(spans: Iterable[Span]) -> Iterator[Span]:
    """What overlaps on a row goes to further rows, ``"dp"`` and ``"dp (2)"``."""
    ends: dict[str, list[float]] = {}
    for span in sorted(spans, key=lambda span: (span.begin_s, span.end_s)):
        lanes = ends.setdefault(span.row, [])
        lane = next((index for index, end_s in enumerate(lanes) if end_s <= span.begin_s), len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        yield span if lane == 0 else replace(span, row=f"{span.row} ({lane + 1})")


def counts(spans: Iterable[Span]) -> Counter[str]:
    """How often each name occurs among what was sent."""
    return Counter(span.name for span in spans if span.row not in (ACTIONS, COMPUTE, OPTIMIZER))


class _Watched(dist.Work):
    """Work that notes when somebody waits for it, and when it is done."""

    def __init__(self, work: dist.Work, waiting: Callable[[], Any], done: Callable[[], None]) -> None:
        super().__init__()
        self._work, self._waiting, self._finished = work, waiting, done

    def wait(self, *args: Any, **kwargs: Any) -> bool:
        with self._waiting():
            result = self._work.wait(*args, **kwargs)
        self._finished()
        return result

    def is_completed(self) -> bool:
        completed = self._work.is_completed()
        if completed:
            self._finished()
        return completed

    def get_future(self) -> Any:
        return self._work.get_future()

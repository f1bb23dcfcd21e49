"""Timelines of training steps in the trace event format of Chrome and Perfetto, simulated and real ones alike.

A process stands for ranks, its threads for what happens side by side: actions, computation, one for each axis of communication.
Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hgc import records
from hgc.errors import ArtifactError

ACTIONS, COMPUTE, OPTIMIZER = "actions", "compute", "optimizer"
"""Rows that are no axis of communication; the optimizer is shown among the computation."""

TraceEvent = dict[str, Any]


class Event(Protocol):
    """Something on a row, in seconds from the start of the step."""

    @property
    def row(self) -> str: ...

    @property
    def begin_s(self) -> float: ...

    @property
    def end_s(self) -> float: ...

    @property
    def name(self) -> str: ...


@dataclass(frozen=True)
class Process:
    """What the ranks that ``name`` stands for do; events of one row do not overlap."""

    name: str
    events: Sequence[Event]


def trace_events(processes: Iterable[Process]) -> Iterator[TraceEvent]:
    """Complete events (``"X"``) in microseconds, empty ones left out; metadata names processes after ranks and threads after rows."""
    for number, process in enumerate(processes):
        yield {"ph": "M", "pid": number, "name": "process_name", "args": {"name": process.name}}
        yield {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
        rows = {COMPUTE if event.row == OPTIMIZER else event.row for event in process.events}
        threads = [*(row for row in (ACTIONS, COMPUTE) if row in rows), *sorted(rows - {ACTIONS, COMPUTE})]
        for thread, row in enumerate(threads):
            yield {"ph": "M", "pid": number, "tid": thread, "name": "thread_name", "args": {"name": row}}
        for event in process.events:
            if event.end_s > event.begin_s:
                yield {
                    "ph": "X",
                    "pid": number,
                    "tid": threads.index(COMPUTE if event.row == OPTIMIZER else event.row),
                    "ts": round(event.begin_s * 1e6, 3),
                    "dur": round((event.end_s - event.begin_s) * 1e6, 3),
                    "cat": event.row,
                    "name": event.name or event.row,
                }


def save(processes: Iterable[Process], path: str | Path) -> None:
    """Write a trace, whole or not at all. Raises ``ArtifactError`` if it cannot be written."""
    _write(list(trace_events(processes)), path)


def lay_over(simulated: str | Path, real: str | Path, target: str | Path) -> None:
    """Write one trace of two, whose steps begin together: each real rank below the simulated ranks that it belongs to.

    Raises ``ArtifactError`` for a file that is no trace, or cannot be written.
    """
    given = {"simulated": _read(simulated), "real": _read(real)}
    places = {
        (source, event["pid"]): (min(_ranks(event["args"]["name"])), source == "real")
        for source, events in given.items()
        for event in events
        if event["name"] == "process_name"
    }
    number = {key: position for position, key in enumerate(sorted(places, key=lambda key: places[key]))}
    _write([_moved(event, source, number[source, event["pid"]]) for source, events in given.items() for event in events], target)


def _ranks(name: str) -> list[int]:
    """The first rank of each run in ``"ranks 0-1,4"``."""
    return [int(run.partition("-")[0]) for run in name.split()[-1].split(",")]


def _moved(event: Mapping[str, Any], source: str, process: int) -> TraceEvent:
    found = {**event, "pid": process}
    if event["name"] == "process_name":
        found["args"] = {"name": f"{source}: {event['args']['name']}"}
    if event["name"] == "process_sort_index":
        found["args"] = {"sort_index": process}
    return found


def _read(path: str | Path) -> list[TraceEvent]:
    found = records.parse_json(records.read_text(path, "trace file", ArtifactError), f"trace file {str(path)!r}", ArtifactError)
    events = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) and {"pid", "name"} <= event.keys() for event in events):
        raise ArtifactError(f"{str(path)!r} holds no trace; give a file that save_trace or a program's --trace has written")
    return events


def _write(events: list[TraceEvent], path: str | Path) -> None:
    text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}, separators=(",", ":"))
    records.write_text(path, text, "trace file", ArtifactError)

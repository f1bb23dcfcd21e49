"""The timeline in the trace event format of Chrome and Perfetto: a process for each group of ranks, a thread for each stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hgc import records
from hgc.backends.simulator.timeline import ACTIONS, Timeline
from hgc.backends.simulator.work import COMPUTE, OPTIMIZER
from hgc.errors import ArtifactError
from hgc.schedule.actions import shown_ranks

_FIRST_ROWS = (ACTIONS, COMPUTE)


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the trace, whole or not at all."""
    content = {"traceEvents": list(trace_events(timeline)), "displayTimeUnit": "ms"}
    records.write_text(path, json.dumps(content, separators=(",", ":")), "trace file", ArtifactError)


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """Complete events (``"X"``) with microseconds; metadata name processes after ranks and threads after streams."""
    for process, (ranks, events) in enumerate(zip(timeline.ranks, timeline.events, strict=True)):
        name = f"rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)}"
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}}
        rows = {event.row for event in events if event.row != OPTIMIZER}
        threads = [*(row for row in _FIRST_ROWS if row in rows), *sorted(rows - set(_FIRST_ROWS))]
        for thread, row in enumerate(threads):
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": row}}
        for event in events:
            if event.end_s > event.begin_s:
                row = COMPUTE if event.row == OPTIMIZER and COMPUTE in threads else event.row
                yield {
                    "ph": "X",
                    "pid": process,
                    "tid": threads.index(row) if row in threads else len(threads),
                    "ts": round(event.begin_s * 1e6, 3),
                    "dur": round((event.end_s - event.begin_s) * 1e6, 3),
                    "cat": event.row,
                    "name": event.name or event.row,
                }

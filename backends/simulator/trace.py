"""The timeline as a trace that Chrome and Perfetto open: a process for each group of ranks, a thread for each stream."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hgc import traces
from hgc.backends.simulator.timeline import Timeline
from hgc.schedule.actions import shown_ranks


def save(timeline: Timeline, path: str | Path) -> None:
    """Write the trace, whole or not at all."""
    traces.save(_processes(timeline), path)


def trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """As :func:`hgc.traces.trace_events`."""
    return traces.trace_events(_processes(timeline))


def _processes(timeline: Timeline) -> Iterator[traces.Process]:
    for ranks, events in zip(timeline.ranks, timeline.events, strict=True):
        yield traces.Process(f"rank{'s' * (len(ranks) > 1)} {shown_ranks(ranks)}", events)

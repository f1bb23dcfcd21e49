"""Read the markers of a flat graph: which nodes belong to which call, and whether the shortcuts taken were sound."""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from dataclasses import dataclass, field

from torch import fx

from hgc.tracing.folding import CallRecord, Marking
from hgc.tracing.leaves import CALL, ENTER, EXIT
from hgc.tracing.shortcuts import Shortcuts, StartOver


@dataclass
class Region:
    """One call of a cell. ``inputs`` and ``outputs`` are nodes outside; ``parameters[i]`` is input ``i`` as seen inside."""

    record: CallRecord
    inputs: list[fx.Node]
    parameters: dict[int, fx.Node] = field(default_factory=dict)
    nodes: list[fx.Node] = field(default_factory=list)
    returned: list[fx.Node] = field(default_factory=list)
    outputs: dict[int, fx.Node] = field(default_factory=dict)


Glue = list[fx.Node]


def read_regions(graph: fx.Graph, marking: Marking) -> list[Region | Glue]:
    """The graph as a sequence of marked calls and of what stands between them."""
    items: list[Region | Glue] = []
    current: Region | None = None
    glue: Glue = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in (ENTER, CALL):
            if glue:
                items.append(glue)
                glue = []
            region = Region(marking.calls[node.args[0]], list(node.args[1]))
            gets = {user.args[1]: user for user in node.users}
            if node.target is ENTER:
                current = region
                region.parameters = gets
            else:
                region.outputs = gets
            items.append(region)
        elif node.target is EXIT:
            assert current is not None
            current.returned = list(node.args[1])
            current.outputs = {user.args[1]: user for user in node.users}
            current = None
        elif not _reads_marker(node):
            (glue if current is None else current.nodes).append(node)
    if glue:
        items.append(glue)
    return items


def _reads_marker(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target in (ENTER, EXIT, CALL)


def check_chains(graph: fx.Graph, items: list[Region | Glue], shortcuts: Shortcuts) -> None:
    """Blocks follow one another; lists whose members all run side by side (experts, towers) are opened instead."""
    containers: dict[tuple[str, bool], list[int]] = defaultdict(list)
    regions = [item for item in items if isinstance(item, Region)]
    for number, region in enumerate(regions):
        cell = region.record.cell
        containers[cell.container, cell.listed].append(number)
    upstream = _upstream(graph, regions)
    for (container, _), numbers in containers.items():
        if len(numbers) < 2 or any(upstream[later] >> earlier & 1 for earlier, later in itertools.pairwise(numbers)):
            continue
        raise StartOver(shortcuts.opening(container))


def _upstream(graph: fx.Graph, regions: list[Region]) -> list[int]:
    """For each region, the set of regions (as bits) that its inputs depend on."""
    own: dict[fx.Node, int] = {}
    for number, region in enumerate(regions):
        for node in (*region.nodes, *region.outputs.values()):
            own[node] = 1 << number
    bits: dict[fx.Node, int] = {}
    for node in graph.nodes:
        found = own.get(node, 0)
        for x in node.all_input_nodes:
            found |= bits.get(x, 0)
        bits[node] = found
    result = []
    for region in regions:
        found = 0
        for node in region.inputs:
            found |= bits[node]
        result.append(found)
    return result


def escapes(region: Region) -> list[fx.Node]:
    """Nodes of a traced call whose values are used outside other than through its outputs."""
    inside = set(region.nodes)
    exits = {user for node in region.returned for user in node.users if user.target is EXIT}
    return [node for node in region.nodes if any(user not in inside and user not in exits for user in node.users)]


def check_folded(items: list[Region | Glue], marking: Marking) -> None:
    """Raise ``StartOver`` for a group that was folded although a value leaves a body by another way than its outputs."""
    folded = {item.record.group for item in items if isinstance(item, Region) and not item.record.traced}
    for group in sorted(folded & marking.read_index):
        raise StartOver(
            marking.shortcuts.without_folding(group),
            f"{_what(items, group)} were traced one by one: they read the number that tells them apart.",
        )
    for item in items:
        if isinstance(item, Region) and item.record.traced and item.record.group in folded:
            leaving = escapes(item)
            if leaving:
                reason = f"{_what(items, item.record.group)} were traced one by one: {leaving[0].name} leaves them other than as an output."
                raise StartOver(marking.shortcuts.without_folding(item.record.group), reason)


def _what(items: list[Region | Glue], group: str) -> str:
    cells = [item.record.cell for item in items if isinstance(item, Region) and item.record.group == group]
    return f"The {len(cells)} blocks {cells[0].kind} in {cells[0].container or 'the model'}"

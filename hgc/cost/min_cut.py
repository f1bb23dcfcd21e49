"""The cheapest set of vertices that separates what is there from what is needed."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping

_SOURCE, _SINK = ("source", 0), ("sink", 0)
_Vertex = tuple[str, int]
_Network = dict[_Vertex, dict[_Vertex, float]]


def cheapest_separation(
    price: Mapping[str, float], edges: Iterable[tuple[str, str]], sources: Iterable[str], sinks: Iterable[str]
) -> frozenset[str]:
    """Vertices of the least total price that meet every path from a source to a sink (both may be among them); the ones nearest to
    the sources where several cost the same. Maximum flow by shortest augmenting paths (Edmonds and Karp)."""
    network: _Network = defaultdict(dict)

    def join(tail: _Vertex, head: _Vertex, capacity: float) -> None:
        network[tail][head] = network[tail].get(head, 0.0) + capacity
        network[head].setdefault(tail, 0.0)

    for name, value in price.items():
        join((name, 0), (name, 1), value)
    for tail_name, head_name in edges:
        join((tail_name, 1), (head_name, 0), math.inf)
    for name in sources:
        join(_SOURCE, (name, 0), math.inf)
    for name in sinks:
        join((name, 1), _SINK, math.inf)
    while path := _path(network):
        flow = min(network[tail][head] for tail, head in path)
        for tail, head in path:
            network[tail][head] -= flow
            network[head][tail] += flow
    near = set(_reached(network))
    return frozenset(name for name in price if (name, 0) in near and (name, 1) not in near)


def _reached(network: _Network) -> dict[_Vertex, _Vertex]:
    """Vertices that more flow can reach, each with where it came from."""
    came: dict[_Vertex, _Vertex] = {_SOURCE: _SOURCE}
    waiting = deque([_SOURCE])
    while waiting:
        tail = waiting.popleft()
        for head, left in network[tail].items():
            if left > 0 and head not in came:
                came[head] = tail
                waiting.append(head)
    return came


def _path(network: _Network) -> list[tuple[_Vertex, _Vertex]]:
    came = _reached(network)
    if _SINK not in came:
        return []
    path, head = [], _SINK
    while head != _SOURCE:
        path.append((came[head], head))
        head = came[head]
    return path

"""How many bytes leave nodes: exact where collectives are rings, whose ranks stand in the order of their numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from hgc.backends.simulator.work import Step
from hgc.cluster import Cluster
from hgc.cost.collectives import Kind, rounds
from hgc.cost.places import axis_groups


class Census:
    """Counts what the ranks of a stage, or of any group, send to other nodes. All numbers are sums over ranks."""

    def __init__(self, cluster: Cluster) -> None:
        self._owners = cluster.owners
        self._backend = cluster.backend

    def crossings(self, ranks: Sequence[int]) -> int:
        """Neighbours in a ring that are on different nodes."""
        owners = [self._owners[rank] for rank in ranks]
        return sum(one != other for one, other in zip(owners, owners[1:] + owners[:1], strict=True)) if len(ranks) > 1 else 0

    def pairs(self, ranks: Sequence[int]) -> int:
        """Ordered pairs of ranks on different nodes."""
        counts = Counter(self._owners[rank] for rank in ranks)
        return len(ranks) ** 2 - sum(count**2 for count in counts.values())

    def collective(self, kind: str, payload_bytes: float, ranks: Sequence[int]) -> float:
        """Bytes that one collective sends out of nodes."""
        count = len(ranks)
        if kind == "all_to_all":
            return self.pairs(ranks) * payload_bytes / count
        if kind == "send":
            return self.crossings(ranks) * payload_bytes
        ring: Kind = kind  # type: ignore[assignment]
        return self.crossings(ranks) * rounds(ring, self._backend) * (count - 1) / count * payload_bytes

    def steps(self, steps: Iterable[Step], mesh: Mapping[str, int], first_rank: int) -> float:
        """Of all groups of a stage, each of which takes these steps."""
        payloads = Counter[tuple[str, str]]()
        for step in steps:
            if step.collective:
                payloads[step.stream, step.collective] += step.payload_bytes  # type: ignore[assignment]  # a Counter adds any numbers
        return sum(
            self.collective(kind, payload, ranks)
            for (stream, kind), payload in payloads.items()
            for ranks in axis_groups(mesh, stream.split("+"), first_rank)
        )

"""How long collectives take: latency of each hop plus bytes over bandwidth, per algorithm (alpha-beta).

``place`` says how the ranks of a group sit on a cluster, ``time_s`` how long a collective among them takes. The constants are the
``Link``s of the cluster; docs/design/cost_models.md lists how far the formulas are from published measurements.

Notation: ``S`` bytes, ``n`` ranks on ``N`` nodes, ``k`` on each; ``B`` the rate of a device's link inside the node, ``U`` what the
group gets of a node's uplinks, both times their efficiencies; ``a``, ``A`` the latency of a hop inside and between nodes.
Bytes are counted as nccl-tests does: the whole buffer of an all-reduce or broadcast, the gathered result of an all-gather, the
input of a reduce-scatter, what one rank holds for an all-to-all, the message of a send.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from hgc import records
from hgc.cluster import Cluster, Link
from hgc.errors import ClusterError

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
Algorithm = Literal["ring", "tree", "switch", "hierarchical", "exchange", "direct"]

TREE_DEGREE = 2
"""A node of NCCL's double binary trees is inner in one (two children) and leaf in the other: it sends and receives ``2 S``."""


@dataclass(frozen=True)
class Place:
    """Where the ranks of a group are, and what they get of the links.

    Args:
        ranks: in the group.
        nodes: that hold them.
        per_node: ranks on the fullest node.
        link: inside the node; the slowest of the nodes'.
        uplink: between nodes; ``None`` for a group within one.
        uplinks: network cards that the group has to itself, per node; below 1 where groups share one.
        backend: of torch.distributed; gloo's reduce-scatter is an all-reduce, in time and in bytes.
    """

    ranks: int
    nodes: int
    per_node: int
    link: Link
    uplink: Link | None
    uplinks: float
    backend: str = "nccl"


def place(cluster: Cluster, ranks: Sequence[int], busy: int | None = None) -> Place:
    """How ``ranks`` sit on the cluster.

    Args:
        busy: devices of each node that send to other nodes at the same time, in this and in other groups; default: all of the node,
            as in a mesh, where all groups of an axis communicate at once. They share the node's uplinks evenly.

    Raises:
        ClusterError: a rank that the cluster does not have, or a rank twice.
    """
    owners = cluster.owners
    for rank in ranks:
        if not 0 <= rank < len(owners):
            raise ClusterError(f"rank {rank} is outside the cluster; its {len(owners)} devices are ranks 0 to {len(owners) - 1}")
    if not ranks or len(set(ranks)) != len(ranks):
        raise ClusterError(f"the group {list(ranks)} is empty or names a rank twice; give distinct ranks")
    counts = Counter(owners[rank] for rank in ranks)
    nodes = [cluster.nodes[number] for number in counts]
    link = min((node.link for node in nodes), key=lambda link: link.bytes_per_s * link.efficiency)
    shares = []
    for number, held in counts.items():
        node = cluster.nodes[number]
        sending = max(held, min(busy or node.count, node.count))
        shares.append(min(sending, node.uplinks) * held / sending)
    uplink = cluster.link if len(counts) > 1 else None
    return Place(len(ranks), len(counts), max(counts.values()), link, uplink, min(shares), cluster.backend)


def rounds(kind: Kind, backend: str) -> int:
    """How often a ring passes the whole buffer around."""
    return 2 if kind == "all_reduce" or (kind == "reduce_scatter" and backend == "gloo") else 1


def time_s(kind: Kind, bytes_: float, where: Place, algorithm: Algorithm | None = None) -> float:
    """Seconds of one collective of ``bytes_`` bytes, with ``algorithm`` or the fastest of those that NCCL and gloo choose from.

    =================  =======================  ===========================================================
    algorithm          latency                  bytes over links, and between nodes
    =================  =======================  ===========================================================
    ring, all_reduce   2 (N-1) A + 2 (n-N) a    2 (n-1)/n S over B; over U
    ring, others       (N-1) A + (n-N) a        (n-1)/n S over B; over U
    tree               2 log2(N) A + 2 (k-1) a  2 (k-1)/k S over B; min(N-1, 2) S over U
    switch             2 log2(N) A + 2 a        S over the switch; min(N-1, 2) S over U
    hierarchical       2 (N-1) A + 2 (k-1) a    2 (k-1)/k S over B; 2 (N-1)/N S over U; one after the other
    exchange           A + a                    (k-1)/n S over B; k (n-k)/n S over U
    direct, broadcast  log2(N) A + log2(k) a    S over B; over U
    direct, send       A, or a in a node        S over one link
    =================  =======================  ===========================================================

    Inside and between overlap: the longer counts, except for hierarchical (which is half of it for a gather or scatter).
    ``base_s`` of the outermost link used is added, and its ``ramp_s * S / (S + ramp_bytes)``.

    Raises:
        ClusterError: a kind or algorithm that does not exist, or does not fit the kind.
    """
    options = algorithms(kind, where)
    if algorithm is not None:
        if algorithm not in options:
            raise ClusterError(f"{kind} has no algorithm {algorithm!r} here; expected one of {', '.join(options)}")
        options = {algorithm: options[algorithm]}
    if where.ranks == 1 or bytes_ == 0:
        return 0.0
    chosen = [formula for name, formula in options.items() if algorithm or name != "hierarchical"]
    outer = where.uplink or where.link
    return outer.base_s + outer.ramp_s * bytes_ / (bytes_ + outer.ramp_bytes) + min(formula(kind, bytes_, where) for formula in chosen)


Formula = Callable[[Kind, float, Place], float]


def algorithms(kind: Kind, where: Place) -> dict[Algorithm, Formula]:
    """Algorithms for a kind of collective at a place, with their formulas, in seconds."""
    if kind not in get_args(Kind):
        raise ClusterError(f"collective is {kind!r}; {records.suggestion(str(kind), get_args(Kind))}")
    if kind == "all_reduce" and where.backend == "gloo":
        return {"ring": _ring}  # gloo's default, which torch does not change
    if kind == "all_reduce":
        found: dict[Algorithm, Formula] = {"ring": _ring, "tree": _tree, "hierarchical": _hierarchical}
        return found | {"switch": _switch} if where.link.switch_bytes_per_s else found
    if kind in ("all_gather", "reduce_scatter"):
        return {"ring": _ring, "hierarchical": _hierarchical}
    return {"exchange": _exchange} if kind == "all_to_all" else {"direct": _direct}


def _ring(kind: Kind, bytes_: float, where: Place) -> float:
    times = rounds(kind, where.backend)
    sent = times * (where.ranks - 1) / where.ranks * bytes_
    latency_s = times * ((where.nodes - 1) * _hop_s(where) + (where.ranks - where.nodes) * where.link.latency_s)
    return latency_s + max(_inside_s(sent, where), _between_s(sent, where))


def _tree(kind: Kind, bytes_: float, where: Place) -> float:
    inside = 2 * (where.per_node - 1) / where.per_node * bytes_
    latency_s = 2 * (math.log2(where.nodes) * _hop_s(where) + (where.per_node - 1) * where.link.latency_s)
    return latency_s + max(_inside_s(inside, where), _between_s(min(where.nodes - 1, TREE_DEGREE) * bytes_, where))


def _switch(kind: Kind, bytes_: float, where: Place) -> float:
    assert where.link.switch_bytes_per_s is not None
    latency_s = 2 * (math.log2(where.nodes) * _hop_s(where) + where.link.latency_s)
    inside_s = bytes_ / where.link.switch_bytes_per_s if where.per_node > 1 else 0.0
    return latency_s + max(inside_s, _between_s(min(where.nodes - 1, TREE_DEGREE) * bytes_, where))


def _hierarchical(kind: Kind, bytes_: float, where: Place) -> float:
    times = rounds(kind, where.backend)
    inside = times * (where.per_node - 1) / where.per_node * bytes_
    between = times * (where.nodes - 1) / where.nodes * bytes_
    latency_s = times * ((where.nodes - 1) * _hop_s(where) + (where.per_node - 1) * where.link.latency_s)
    return latency_s + _inside_s(inside, where) + _between_s(between, where)


def _exchange(kind: Kind, bytes_: float, where: Place) -> float:
    inside = (where.per_node - 1) / where.ranks * bytes_
    between = where.per_node * (where.ranks - where.per_node) / where.ranks * bytes_
    inside_s = inside / (where.link.bytes_per_s * (where.link.exchange_efficiency or where.link.efficiency))
    between_s = 0.0
    if where.uplink:
        between_s = between / (where.uplink.bytes_per_s * where.uplinks * (where.uplink.exchange_efficiency or where.uplink.efficiency))
    return _hop_s(where) * (where.nodes > 1) + where.link.latency_s * (where.per_node > 1) + max(inside_s, between_s)


def _direct(kind: Kind, bytes_: float, where: Place) -> float:
    if kind == "send":
        return _hop_s(where) + _between_s(bytes_, where) if where.uplink else where.link.latency_s + _inside_s(bytes_, where)
    latency_s = math.log2(where.nodes) * _hop_s(where) + math.log2(where.per_node) * where.link.latency_s
    return latency_s + max(_inside_s(bytes_ * (where.per_node > 1), where), _between_s(bytes_, where))


def _hop_s(where: Place) -> float:
    return where.uplink.latency_s if where.uplink else 0.0


def _inside_s(sent: float, where: Place) -> float:
    """Bytes that one rank sends over its link; nothing if it is the only one of its node."""
    return sent / (where.link.bytes_per_s * where.link.efficiency) if where.per_node > 1 else 0.0


def _between_s(sent: float, where: Place) -> float:
    """Bytes that the ranks of one node send out of it together, over the group's share of uplinks."""
    return sent / (where.uplink.bytes_per_s * where.uplink.efficiency * where.uplinks) if where.uplink else 0.0

"""What a value costs that passes from one mesh to another: the bytes that the executor's exchange sends, and how long they take."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from hgc.cluster import Cluster
from hgc.cost.collectives import place, time_s
from hgc.ir.ops.layout import Zigzag, order_of
from hgc.ir.placement import Shard
from hgc.runtime.executor_exchange import Side
from hgc.runtime.executor_volume import volume

Bytes = NDArray[np.float64]
"""[ranks that send, ranks that receive], counted from the first rank of each side."""


@dataclass(frozen=True)
class Crossing:
    """A value of ``dims`` dims that passes between two sides; ``bytes_`` of the whole value. ``gradient``: as ``exchange`` has it."""

    source: Side
    target: Side
    dims: int
    bytes_: float
    gradient: bool = False


def sent_bytes(crossings: Iterable[Crossing]) -> Bytes:
    """What each rank sends to each other one, all crossings (of the same ranks) together; what stays on a rank is zero."""
    found: Bytes = sum((each.bytes_ * shares(each.source, each.target, each.dims, each.gradient) for each in crossings), np.zeros(()))
    return found


@lru_cache(maxsize=1 << 16)
def shares(source: Side, target: Side, dims: int, gradient: bool = False) -> Bytes:
    """The same as parts of the whole value, which are alike for all sizes that divide."""
    shape = [math.lcm(_least(source, dim), _least(target, dim)) for dim in range(dims)]
    found: Bytes = volume(source, target, shape, gradient).numpy() / math.prod(shape)
    ranks, others = (np.arange(side.first_rank, side.first_rank + side.devices) for side in (source, target))
    found[ranks[:, None] == others[None, :]] = 0
    return found


def _least(where: Side, dim: int) -> int:
    """The smallest size that divides as a side needs it."""
    size = 1
    for axis, ranks in where.mesh:
        shard = where.parsed().get(axis)
        if isinstance(shard, Shard) and shard.dim == dim:
            order = order_of(shard)
            assert not isinstance(order, tuple), f"{shard} has parts of fixed sizes, which no value between blocks has"
            size *= ranks * (2 * order.runs if isinstance(order, Zigzag) else order)
    return size


def exchange_s(cluster: Cluster, first_source: int, first_target: int, sent: Bytes) -> float:
    """Seconds until all has arrived that ranks from ``first_source`` on send to those from ``first_target`` on, all at once.

    A rank's messages share its link, those to other nodes its part of the uplinks; inside and between overlap. The busiest rank counts.
    """
    inside = _together(cluster, first_source, first_target, sent)
    kinds = [np.array([id(cluster.nodes[owner]) for owner in owners]) for owners in _owners(cluster, first_source, first_target, sent)]
    slowest = 0.0
    for sender, receiver, is_inside in itertools.product(np.unique(kinds[0]), np.unique(kinds[1]), (True, False)):
        counts = (kinds[0] == sender)[:, None] & (kinds[1] == receiver)[None, :] & (inside == is_inside)
        amounts = np.where(counts, sent, 0.0)
        busiest = max(amounts.sum(1).max(), amounts.sum(0).max())
        if busiest:
            row, column = np.unravel_index(amounts.argmax(), amounts.shape)
            slowest = max(slowest, time_s("send", float(busiest), place(cluster, (first_source + int(row), first_target + int(column)))))
    return slowest


def between_nodes_bytes(cluster: Cluster, first_source: int, first_target: int, sent: Bytes) -> float:
    """What leaves nodes, of all ranks together."""
    return float(sent[~_together(cluster, first_source, first_target, sent)].sum())


def _together(cluster: Cluster, first_source: int, first_target: int, sent: Bytes) -> NDArray[np.bool_]:
    """``[ranks that send, ranks that receive]``: are they on one node?"""
    rows, columns = _owners(cluster, first_source, first_target, sent)
    found: NDArray[np.bool_] = rows[:, None] == columns[None, :]
    return found


def _owners(cluster: Cluster, first_source: int, first_target: int, sent: Bytes) -> tuple[NDArray[np.int_], NDArray[np.int_]]:
    """The nodes of the ranks that send, and of those that receive."""
    owners, (senders, receivers) = np.asarray(cluster.owners), sent.shape
    return owners[first_source : first_source + senders], owners[first_target : first_target + receivers]

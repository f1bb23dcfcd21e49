"""Where the groups of a mesh sit on a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from statistics import NormalDist

from hgc.cluster import Cluster, Device
from hgc.cost.collectives import Place, place, time_s

_PROBE_BYTES = 64 * 2**20
"""By the time of an all-reduce of so many bytes the slowest group of an axis is found."""


def axis_places(cluster: Cluster, mesh: Mapping[str, int], first_rank: int = 0) -> dict[str, Place]:
    """Each axis of a mesh (major axis first, ranks from ``first_rank`` on) -> the place of its slowest group."""
    return {axis: group_place(cluster, mesh, (axis,), first_rank) for axis in mesh}


def group_place(cluster: Cluster, mesh: Mapping[str, int], axes: Sequence[str], first_rank: int = 0) -> Place:
    """The slowest of the groups that span ``axes`` together, such as those that sum gradients over ``("dp", "cp")``.

    Raises ``ClusterError`` if the cluster has fewer ranks than the mesh needs.
    """
    owners, alike = cluster.owners, {id(node): hash(node) for node in {id(node): node for node in cluster.nodes}.values()}
    found: dict[tuple[int, ...], Place] = {}
    for ranks in axis_groups(mesh, axes, first_rank):
        inside = [rank for rank in ranks if rank < len(owners)]
        firsts: dict[int, int] = {}
        shape = tuple(firsts.setdefault(owners[rank], len(firsts)) for rank in inside)
        kinds = tuple(alike[id(cluster.nodes[number])] for number in firsts)
        if (*shape, *kinds) not in found or len(inside) < len(ranks):
            found[(*shape, *kinds)] = place(cluster, ranks)
    return max(found.values(), key=lambda where: time_s("all_reduce", _PROBE_BYTES, where))


def slowest_device(cluster: Cluster, ranks: Sequence[int]) -> Device:
    """Of the devices of these ranks, the one with the least bfloat16 peak."""
    nodes = {cluster.owners[rank] for rank in ranks}
    return min((cluster.nodes[number].device for number in sorted(nodes)), key=lambda device: device.bfloat16_flops_per_s)


def in_step(device: Device, devices: int) -> Device:
    """The slowest of ``devices`` devices of this kind, whose FLOP rates are normally distributed: a job in step has its pace.

    The expected extreme of ``n`` is at the ``(n - 3/8) / (n + 1/4)`` quantile (Blom 1958).
    """
    slower = 1 + device.deviation * NormalDist().inv_cdf((devices - 0.375) / (devices + 0.25))
    rates = {field.name: getattr(device, field.name) for field in fields(Device) if field.name.endswith("_flops_per_s")}
    return replace(device, **{name: rate / slower for name, rate in rates.items() if rate is not None})


def axis_groups(mesh: Mapping[str, int], axes: Sequence[str], first_rank: int = 0) -> list[list[int]]:
    """Ranks of each group that spans these axes; ranks differ fastest in the last axis of the mesh."""
    sizes = list(mesh.values())
    strides = [math.prod(sizes[index + 1 :]) for index in range(len(sizes))]

    def offsets(inside: bool) -> list[int]:
        steps = [
            range(0, size * stride, stride) for axis, size, stride in zip(mesh, sizes, strides, strict=True) if (axis in axes) == inside
        ]
        return [sum(chosen) for chosen in itertools.product(*steps)]

    return [[first_rank + start + offset for offset in offsets(True)] for start in offsets(False)]

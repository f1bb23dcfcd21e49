"""From measured times to a cluster description: the constants of the cost models that come nearest to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from hgc.cluster import Cluster, Device, Kernels, Link, Node
from hgc.cost import compute
from hgc.tools.calibration import kernels as calibrated
from hgc.tools.calibration import networks
from hgc.tools.calibration.points import Array, Products, Sweep
from hgc.tools.profile.kernels import Moved

FREE_KERNELS = ("matmul_efficiency", "tile_s", "cache_bytes_per_s")
FREE_LINK = ("latency_s", "base_s", "efficiency", "exchange_efficiency")
LARGE_BYTES = 2**20
"""Messages from this size on tell a link's rate."""


@dataclass(frozen=True)
class Measured:
    """Everything timed on one machine, the same on every rank; ``between`` is empty on a single node."""

    name: str
    type: str
    memory_bytes: int
    units: int
    nodes: int
    per_node: int
    launch_s: float
    unit_s: float
    moved: Moved
    products: dict[str, Products]
    inside: tuple[Sweep, ...]
    between: tuple[Sweep, ...]


@dataclass(frozen=True)
class Residual:
    """How far a fitted model is from what it was fitted to."""

    what: str
    points: int
    median: float
    p90: float


def cluster(measured: Measured) -> tuple[Cluster, list[Residual]]:
    """The cluster file, and how well its constants repeat the measurements."""
    device, residuals = _device(measured)
    nominal = Link(latency_s=1e-5, bytes_per_s=1e9)
    node = Node(device, measured.per_node, nominal)
    if measured.inside:
        link, found = _link(measured.inside, node, None)
        node, residuals = replace(node, link=link), residuals + found
    outer = None
    if measured.between:
        outer, found = _link(measured.between, node, nominal)
        residuals = residuals + found
    shape = f"{measured.nodes} x {measured.per_node} {measured.name}"
    return Cluster((node,) * measured.nodes, outer, name=f"{shape}, measured"), residuals


def _device(measured: Measured) -> tuple[Device, list[Residual]]:
    peaks = {dtype: float(np.max(_rates(points))) for dtype, points in measured.products.items()}
    bandwidth, floor_s = _bandwidth(measured.moved, measured.launch_s)
    start = Device(
        name=measured.name,
        type=measured.type,
        memory_bytes=measured.memory_bytes,
        memory_bytes_per_s=bandwidth,
        float32_flops_per_s=peaks["float32"],
        bfloat16_flops_per_s=peaks["bfloat16"],
        kernels=Kernels(units=measured.units, memory_efficiency=1.0, launch_s=floor_s, unit_s=measured.unit_s),
    )
    fitted_to = "bfloat16" if measured.type == "cuda" else "float32"
    points = measured.products[fitted_to]
    kernels, _ = calibrated.fit(start, points, FREE_KERNELS, fitted_to)
    device = replace(start, kernels=kernels)
    moved_s = np.asarray(compute.memory_time_s(device, measured.moved.bytes))
    return device, [
        _residual(f"products in {fitted_to}", calibrated.predict(device, points, fitted_to), points.measured_s),
        _residual("memory-bound kernels", moved_s, measured.moved.measured_s),
    ]


def _rates(points: Products) -> Array:
    return 2 * points.m * points.n * points.k * points.batch / points.measured_s


def _bandwidth(moved: Moved, launch_s: float) -> tuple[float, float]:
    """Bytes a second beyond the launch, the median in logarithms over kernels large enough to tell it; and the launch."""
    beyond = moved.measured_s - launch_s
    large = beyond > launch_s
    if not large.any():
        large = moved.bytes == moved.bytes.max()
        beyond = moved.measured_s
    return float(np.exp(np.mean(np.log(moved.bytes[large] / beyond[large])))), launch_s


def _link(told: Sequence[Sweep], node: Node, outer: Link | None) -> tuple[Link, list[Residual]]:
    """Constants of a link; its rate is the best seen, so that efficiencies are shares of it. All ranks of a node share an outer link."""
    rate = max(float(np.max(_bus_rates(sweep))) for sweep in told) * (1 if outer is None else node.count)
    free = FREE_LINK
    start = Link(latency_s=1e-5, bytes_per_s=rate, exchange_efficiency=0.7)
    target = networks.Target("measured", None if outer is None else "measured", free=free)
    fitted = networks.fit(target, start, told, node, 1)
    where = "inside a node" if outer is None else "between nodes"
    return fitted.link, [_residual(f"{sweep.collective} {where}", predicted, sweep.measured_s) for sweep, predicted in fitted.residuals]


def _bus_rates(sweep: Sweep) -> Array:
    """Bytes a second over one rank's link, for large messages."""
    sent = {"all_reduce": 2 * (sweep.ranks - 1) / sweep.ranks, "send": 1.0}.get(sweep.collective, (sweep.ranks - 1) / sweep.ranks)
    large = sweep.size_bytes >= LARGE_BYTES
    return sent * sweep.size_bytes[large] / sweep.measured_s[large]


def _residual(what: str, predicted: Array, measured: Array) -> Residual:
    off = np.abs(predicted / measured - 1)
    return Residual(what, len(off), float(np.median(off)), float(np.quantile(off, 0.9)))

"""Fits ``Link``s, inside and between nodes, to sweeps of collectives over message sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
from scipy.optimize import least_squares

from hgc.cluster import Cluster, Link, Node
from hgc.cost import collectives
from hgc.cost.collectives import Algorithm, Kind
from hgc.tools.calibration.points import Array, Sweep

START = {
    "latency_s": 2e-5,
    "base_s": 1.4e-5,
    "ramp_s": 1e-4,
    "ramp_bytes": 1e7,
    "efficiency": 0.9,
    "switch_bytes_per_s": 0.6,
    "exchange_efficiency": 0.7,
}
"""Where fits start; the switch as a share of the link's rate."""
RAMP = ("ramp_s", "ramp_bytes")
LATENCY = ("latency_s", *RAMP)
COPIED = ("latency_s", "base_s", "ramp_s", "ramp_bytes", "efficiency", "exchange_efficiency")


@dataclass(frozen=True)
class Target:
    """A link to be fitted, inside the nodes of ``device`` or, with ``network``, between them.

    Args:
        like: preset of the same kind whose constants are taken where ``free`` does not name them.
        free: constants to fit.
        sweeps: labels of the sweeps that tell of them.
        overhead: the sweeps were timed by a Python script; its constant overhead is fitted too, and dropped.
        switch: the devices' switches reduce (Hopper and later).
    """

    device: str
    network: str | None = None
    like: str | None = None
    free: tuple[str, ...] = ()
    sweeps: tuple[str, ...] = ()
    overhead: bool = False
    switch: bool = False


SOURCES = {
    "Real network": "ml-eng",
    "8x H200 sweep": "ml-eng",
    "1 vs 4 nodes": "ml-eng",
    "NVLS ramp": "ramp",
    "collectives at 16GiB": "16GiB",
    "network/benchmarks": "ml-eng",
    "2x p4de": "aws",
    "2x p5": "aws",
    "EKS excerpt": "eks",
    "topology-aware": "aws",
    "dgxc-benchmarking": "dgxc",
    "create-a3mega": "a3mega",
    "dranet": "dranet",
    "dstack": "dstack",
    "gke-a3-highgpu": "gke",
    "Pollara": "oracle",
    "GTC NCCL": "gtc",
    "li-plus": "li-plus",
    "issue 1374": "issue-1374",
    "issue 1281": "issue-1281",
    "experiments/bandwidth": "bigscience",
    "issue 2928": "bigscience",
}
"""Part of a row's source -> its short name."""

TARGETS = (
    Target(
        "h100",
        switch=True,
        free=("base_s", *RAMP, "efficiency", "switch_bytes_per_s", "exchange_efficiency"),
        sweeps=(
            "H100-80GB 1x8 all_reduce dgxc",
            "H100-80GB 1x8 all_reduce Ring gtc",
            "H100-80GB 1x8 all_reduce NVLS gtc",
            "H100-80GB 1x8 all_to_all gtc",
            "H100-80GB 1x8 all_gather issue-1281",
            "H100-80GB 1x8 reduce_scatter issue-1281",
        ),
    ),
    Target(
        "h200",
        switch=True,
        like="h100",
        free=(*RAMP, "efficiency", "switch_bytes_per_s"),
        sweeps=(
            "H200 1x8 all_reduce Ring<=1MiB, ml-eng",
            *(f"H200 1x{ranks} all_reduce Ring ramp" for ranks in (4, 5, 6, 7, 8)),
            *(f"H200 1x{ranks} all_reduce NVLS ramp" for ranks in (5, 6, 7, 8)),
            "H200 1x8 all_gather Ring 16GiB",
            "H200 1x8 reduce_scatter Ring 16GiB",
        ),
        overhead=True,
    ),
    Target(
        "b200",
        switch=True,
        like="h100",
        free=(*RAMP, "efficiency", "switch_bytes_per_s", "exchange_efficiency"),
        sweeps=(
            "B200 1x8 all_reduce ml-eng",
            *(f"B200 1x{ranks} all_reduce Ring ramp" for ranks in (4, 5, 6, 7, 8)),
            *(f"B200 1x{ranks} all_reduce NVLS ramp" for ranks in (6, 7, 8)),
            "B200 1x8 all_to_all gtc",
        ),
        overhead=True,
    ),
    Target(
        "a100-80",
        like="h100",
        free=(*RAMP, "efficiency", "exchange_efficiency"),
        sweeps=("A100 1x8 all_reduce ml-eng", "A100 1x8 all_reduce gtc", "A100 1x8 send li-plus", "A100 1x8 all_to_all gtc"),
        overhead=True,
    ),
    Target("a100-40", like="a100-80"),
    Target("a800", like="a100-80"),
    Target("h100-96-500w", switch=True, like="h100"),
    Target("v100-32", like="a100-80", free=("efficiency",), sweeps=("V100 1x8 all_reduce gtc",)),
    Target("v100-16", like="v100-32"),
    Target("h800", switch=True, like="h100", free=("switch_bytes_per_s",), sweeps=("H800 1x8 all_reduce issue-1374",)),
    Target(
        "gb200",
        switch=True,
        like="b200",
        free=("efficiency", "switch_bytes_per_s", "exchange_efficiency"),
        sweeps=("GB200 8x4 all_reduce Ring gtc", "GB200 8x4 all_reduce SHARP gtc", "GB200 8x4 all_to_all gtc"),
    ),
    Target("b300", switch=True, like="b200"),
    Target("gb300", switch=True, like="gb200"),
    Target("rtx4090", like="a100-80", free=("efficiency",), sweeps=("PCIe gen4 GPUs 1x8 all_reduce gtc",)),
    # the only sweep between nodes without a cloud's network: neither GPU nor cards are named, but 8 cards of 100 Gbit/s fit
    Target(
        "a100-80",
        "roce-8x100",
        free=(*LATENCY, "efficiency"),
        sweeps=("unspecified (8-GPU nodes) 4x8 all_reduce ml-eng",),
        overhead=True,
    ),
    Target(
        "a100-80",
        "infiniband-8x200",
        like="roce-8x100",
        free=("efficiency", "exchange_efficiency"),
        sweeps=("A100 4x8 all_reduce gtc", "A100 4x8 all_to_all gtc"),
    ),
    Target(
        "h100",
        "infiniband-8x400",
        like="infiniband-8x200",
        free=("exchange_efficiency",),
        sweeps=("H100-80GB 4x8 all_reduce Ring gtc", "H100-80GB 4x8 all_to_all gtc"),
    ),
    *(Target("h100", f"infiniband-{cards}", like="infiniband-8x400") for cards in ("8x800", "72x400", "72x800", "4x100")),
    *(Target("a100-80", name, like="infiniband-8x200") for name in ("roce-4x100", "roce-8x200")),
    Target(
        "a100-80",
        "omnipath-4x100",
        like="infiniband-8x200",
        free=("efficiency",),
        sweeps=("A100 4x8 all_reduce Ring bigscience",),
    ),
    Target(
        "v100-32",
        "omnipath-4x100-v100",
        like="infiniband-8x200",
        free=("efficiency",),
        sweeps=("V100-32GB 4x4 all_reduce Ring bigscience", "V100-32GB 16x4 all_reduce Ring bigscience"),
    ),
    Target(
        "b200",
        "roce-8x400",
        like="roce-8x100",
        free=("efficiency", "exchange_efficiency"),
        sweeps=("MI355X 4x8 all_reduce oracle", "MI355X 2x8 all_to_all oracle", "MI355X 4x8 all_to_all oracle"),
    ),
    Target("a100-80", "efa-p4d", free=(*LATENCY, "efficiency"), sweeps=("A100-80GB 2x8 all_reduce aws",)),
    Target("h100", "efa-p5", free=(*LATENCY, "efficiency"), sweeps=("H100-80GB 2x8 all_reduce aws",)),
    Target("h200", "efa-p5en", like="efa-p5"),
    Target("b200", "efa-p6", like="efa-p5", free=(*RAMP, "efficiency"), sweeps=("B200 4x8 all_reduce ml-eng",), overhead=True),
    Target("h100", "gcp-tcpxo", free=(*LATENCY, "efficiency"), sweeps=("H100-80GB 2x8 all_reduce a3mega",)),
    Target(
        "h100",
        "gcp-tcpx",
        like="gcp-tcpxo",
        free=(*RAMP, "efficiency"),
        sweeps=("H100-80GB 2x8 all_gather dstack", "H100-80GB 2x8 all_gather gke"),
    ),
    # nothing to fit: how far other machines of the same make are from the constants
    Target("h100", "efa-p5", sweeps=("H100-80GB 2x8 all_reduce eks",)),
    Target("b200", "roce-8x400", sweeps=("B200 2x8 all_gather dranet",)),
)
"""In an order in which each comes after those it needs."""


@dataclass(frozen=True)
class Fitted:
    """A target with its link, and predicted seconds (with the script's overhead, if any) beside each of its sweeps."""

    target: Target
    link: Link
    residuals: tuple[tuple[Sweep, Array], ...]


def calibrate(sweeps: Sequence[Sweep], nodes: dict[str, Node], networks: dict[str, tuple[Link, int]]) -> list[Fitted]:
    """Links of all targets; ``nodes`` and ``networks`` (link, uplinks) are the presets as they stand."""
    nodes, networks, found = dict(nodes), dict(networks), []
    for target in TARGETS:
        told = [sweep for sweep in sweeps if label(sweep) in target.sweeps]
        if target.network is None:
            node = nodes[target.device]
            fitted = fit(target, _start(target, node.link, nodes[target.like].link if target.like else None), told, node, 1)
            nodes[target.device] = replace(node, link=fitted.link)
        else:
            link, uplinks = networks[target.network]
            base = replace(link, base_s=nodes["h100"].link.base_s)
            fitted = fit(
                target, _start(target, base, networks[target.like][0] if target.like else None), told, nodes[target.device], uplinks
            )
            networks[target.network] = (fitted.link, uplinks)
        found.append(fitted)
    return found


def predict(sweep: Sweep, node: Node, link: Link | None, uplinks: int) -> Array:
    """Seconds for each message size of a sweep, on nodes of ``node``; without ``link`` all is one node (an NVLink rack too)."""
    per_node = sweep.ranks // sweep.nodes
    count = sweep.nodes if link else 1
    held = max(per_node, sweep.busy)
    cluster = Cluster((replace(node, count=held if link else max(node.count, sweep.ranks), uplinks=uplinks),) * count, link)
    ranks = range(sweep.ranks) if count == 1 else [number * held + rank for number in range(count) for rank in range(per_node)]
    where = collectives.place(cluster, ranks)
    kind = cast(Kind, sweep.collective)
    algorithm = ALGORITHMS.get(sweep.algorithm.split(" ")[0]) if kind == "all_reduce" else None
    if kind == "send":
        where = replace(where, ranks=2, per_node=2)
    return np.array([collectives.time_s(kind, size, where, algorithm) for size in sweep.size_bytes.tolist()])


ALGORITHMS: dict[str, Algorithm] = {"Ring": "ring", "NVLS": "switch", "SHARP": "switch"}
"""As the rows name them -> the model's; others leave the choice to the model, as NCCL chose."""


def _start(target: Target, link: Link, like: Link | None) -> Link:
    """Constants of ``like``, the rate of ``link``."""
    if like is not None:
        link = replace(link, **{name: getattr(like, name) for name in COPIED})
    share = like.switch_bytes_per_s / like.bytes_per_s if like and like.switch_bytes_per_s else START["switch_bytes_per_s"]
    return replace(link, switch_bytes_per_s=float(f"{share * link.bytes_per_s:.3g}") if target.switch else None)


def fit(target: Target, link: Link, told: Sequence[Sweep], node: Node, uplinks: int) -> Fitted:
    weight = np.concatenate([np.full(len(sweep.size_bytes), len(sweep.size_bytes) ** -0.25) for sweep in told]) if told else np.array([])

    def times(logs: Array) -> list[Array]:
        tried = _with(link, target.free, logs)
        where, outer = (replace(node, link=tried), None) if target.network is None else (node, tried)
        overhead_s = float(np.exp(logs[-1])) if target.overhead else 0.0
        return [predict(sweep, where, outer, uplinks) + overhead_s for sweep in told]

    def errors(logs: Array) -> Array:
        ratios = [predicted / sweep.measured_s for predicted, sweep in zip(times(logs), told, strict=True)]
        return weight * np.log(np.concatenate(ratios))

    first = START | {"switch_bytes_per_s": START["switch_bytes_per_s"] * link.bytes_per_s}
    start = np.log([first[name] for name in target.free] + [3e-5] * target.overhead)
    if told:
        most = [0.0 if name.endswith("efficiency") else np.inf for name in target.free] + [np.inf] * target.overhead
        start = least_squares(
            errors, start, bounds=(-np.inf, most), loss="soft_l1", f_scale=0.1, x_scale=0.3, diff_step=1e-3, max_nfev=200
        ).x
    rounded = {name: float(f"{getattr(_with(link, target.free, start), name):.3g}") for name in target.free}
    made = replace(link, **rounded)
    if made.exchange_efficiency is not None:  # one that is taken from a faster network
        made = replace(made, exchange_efficiency=min(made.exchange_efficiency, made.efficiency))
    return Fitted(target, made, tuple(zip(told, times(start), strict=True)))


def _with(link: Link, names: Sequence[str], logs: Array) -> Link:
    values = dict(zip(names, np.exp(logs[: len(names)]).tolist(), strict=True))
    return replace(link, **values)


def label(sweep: Sweep) -> str:
    """Short name of a sweep: ``H100-80GB 1x8 all_reduce dgxc``."""
    source = next((word for word in SOURCES if word in sweep.source), sweep.source)
    algorithm = f" {sweep.algorithm.split(' ')[0]}" if sweep.algorithm else ""
    return f"{sweep.gpu} {sweep.nodes}x{sweep.ranks // sweep.nodes} {sweep.collective}{algorithm} {SOURCES.get(source, source)}"

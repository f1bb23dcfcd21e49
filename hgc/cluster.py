"""The hardware a program is planned for, as plain data: ``Cluster`` of ``Node`` of ``Device``, joined by ``Link``."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import TypeVar

from hgc import records
from hgc.errors import ClusterError

VERSION = 1
DEVICE_TYPES = {"cpu": "gloo", "cuda": "nccl"}
"""Device type, as torch spells it -> the torch.distributed backend that serves it."""


@dataclass(frozen=True)
class Kernels:
    """What kernels reach of a device's peaks: the constants of ``hgc.cost.compute``, fitted by ``python -m hgc.tools.calibration``.

    Args:
        units: streaming multiprocessors, each of which works on one tile of an output.
        matmul_efficiency: share of peak inside the main loop of a tile; ``float8_matmul_efficiency`` for 8 bits and less.
        tile_s: time outside the main loop for a tile of 128 x 128; proportional to the tile's area.
        cache_bytes_per_s: rate at which all units together load operands of tiles.
        wave_sharpness: how much of a last, partly filled wave of tiles is lost (0: nothing, 1: all).
        half_aligned, unaligned: speed left when rows start at multiples of 4, or of 2 bytes only, instead of 16.
        memory_efficiency: share of peak memory bandwidth.
        launch_s: least time of a kernel.
        score_s: time that one unit takes for the softmax of one attention score, beside the products.
        unit_s: what FSDP2's hooks take for each gather and scatter of a unit on a device that does not run ahead of them, a CPU.
    """

    units: int = 1
    matmul_efficiency: float = 0.8
    float8_matmul_efficiency: float = 0.7
    tile_s: float = 0.0
    cache_bytes_per_s: float = 1e18
    wave_sharpness: float = 0.0
    half_aligned: float = 1.0
    unaligned: float = 1.0
    memory_efficiency: float = 0.8
    launch_s: float = 5e-6
    score_s: float = 0.0
    unit_s: float = 0.0

    def __post_init__(self) -> None:
        records.check_whole("units", self.units, 1, ClusterError)
        for name in SHARES:
            value = getattr(self, name)
            records.check_positive(name, value, ClusterError)
            if value > 1:
                raise ClusterError(f"{name} is {value}; expected a share of the peak, above 0 and at most 1")
        for name in ("tile_s", "wave_sharpness", "launch_s", "score_s", "unit_s"):
            records.check_positive(name, getattr(self, name), ClusterError, zero=True)
        if self.wave_sharpness > 1:
            raise ClusterError(f"wave_sharpness is {self.wave_sharpness}; expected a number from 0 to 1")
        records.check_positive("cache_bytes_per_s", self.cache_bytes_per_s, ClusterError)


SHARES = ("matmul_efficiency", "float8_matmul_efficiency", "half_aligned", "unaligned", "memory_efficiency")
"""Fields of :class:`Kernels` that are shares of a peak."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process' share of a CPU. Speeds are dense peaks; ``kernels`` says what is reached of them.

    A peak that is ``None`` means the device has no units for that type. ``deviation``: how much the FLOP rates of devices of this kind
    differ, as a share (one standard deviation); a job that keeps in step runs at the pace of its slowest.
    """

    name: str
    type: str
    memory_bytes: int
    memory_bytes_per_s: float
    float32_flops_per_s: float
    bfloat16_flops_per_s: float
    float16_flops_per_s: float | None = None
    tfloat32_flops_per_s: float | None = None
    float8_flops_per_s: float | None = None
    float4_flops_per_s: float | None = None
    kernels: Kernels = Kernels()
    deviation: float = 0.0

    def __post_init__(self) -> None:
        records.check_positive("deviation", self.deviation, ClusterError, zero=True)
        if self.type not in DEVICE_TYPES:
            raise ClusterError(f"device type is {self.type!r}; expected one of {', '.join(DEVICE_TYPES)}")
        records.check_whole("memory_bytes", self.memory_bytes, 1, ClusterError)
        for name in ("memory_bytes_per_s", "float32_flops_per_s", "bfloat16_flops_per_s"):
            records.check_positive(name, getattr(self, name), ClusterError)
        for name in ("float16_flops_per_s", "tfloat32_flops_per_s", "float8_flops_per_s", "float4_flops_per_s"):
            if getattr(self, name) is not None:
                records.check_positive(name, getattr(self, name), ClusterError)


@dataclass(frozen=True)
class Link:
    """What joins devices; ``hgc.cost.collectives`` says how collectives use it.

    A message of ``n`` bytes takes ``base_s + latency_s + n / (bytes_per_s * efficiency) + ramp_s * n / (n + ramp_bytes)`` seconds.

    Args:
        latency_s: of one hop.
        bytes_per_s: per direction and device (links between nodes: per network card).
        efficiency: share of ``bytes_per_s`` that a large ring collective reaches.
        base_s: what each collective takes beside its hops: launch, rendezvous.
        ramp_s, ramp_bytes: time lost until the pipeline of chunks is full, and the message size at which half of it is lost.
        switch_bytes_per_s: bytes of a buffer that switches reduce per second (NVLS); ``None``: switches only forward.
        exchange_efficiency: as ``efficiency``, of an all-to-all; ``None``: equal.
    """

    latency_s: float
    bytes_per_s: float
    efficiency: float = 1.0
    base_s: float = 0.0
    ramp_s: float = 0.0
    ramp_bytes: float = 1.0
    switch_bytes_per_s: float | None = None
    exchange_efficiency: float | None = None

    def __post_init__(self) -> None:
        for name in ("bytes_per_s", "efficiency", "ramp_bytes"):
            records.check_positive(name, getattr(self, name), ClusterError)
        for name in ("latency_s", "base_s", "ramp_s"):
            records.check_positive(name, getattr(self, name), ClusterError, zero=True)
        for name in ("switch_bytes_per_s", "exchange_efficiency"):
            if getattr(self, name) is not None:
                records.check_positive(name, getattr(self, name), ClusterError)


@dataclass(frozen=True)
class Node:
    """A machine with ``count`` equal devices, each pair of which is joined by ``link``.

    ``uplinks`` network cards lead out of it; its devices share them, and no device drives more than one at a time.
    """

    device: Device
    count: int
    link: Link
    uplinks: int = 1

    def __post_init__(self) -> None:
        records.check_whole("count", self.count, 1, ClusterError)
        records.check_whole("uplinks", self.uplinks, 1, ClusterError)


@dataclass(frozen=True)
class Cluster:
    """Nodes joined by one kind of ``link``, the rate of one network card (``None`` for a single node).

    Ranks are numbered node by node. Nodes may differ in device, count, link and uplinks.
    """

    nodes: tuple[Node, ...]
    link: Link | None = None
    name: str = "cluster"

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ClusterError("the cluster has no nodes; give at least one")
        if len(self.nodes) > 1 and self.link is None:
            raise ClusterError(f"the cluster has {len(self.nodes)} nodes and no link between them; give link=Link(...)")
        types = sorted({node.device.type for node in self.nodes})
        if len(types) > 1:
            raise ClusterError(f"the cluster mixes device types {' and '.join(types)}; one program runs on one type, so keep one of them")

    @property
    def devices(self) -> int:
        """Number of devices, which is the number of ranks."""
        return sum(node.count for node in self.nodes)

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """Rank -> the number of its node."""
        return tuple(number for number, node in enumerate(self.nodes) for _ in range(node.count))

    @property
    def least_memory_bytes(self) -> int:
        """Of the device that has least."""
        return min(node.device.memory_bytes for node in self.nodes)

    @property
    def device_type(self) -> str:
        return self.nodes[0].device.type

    @property
    def backend(self) -> str:
        """The torch.distributed backend."""
        return DEVICE_TYPES[self.device_type]

    @staticmethod
    def local(devices: int) -> Cluster:
        """``devices`` CPU processes on this machine, with nominal speeds (a core, loopback); memory is shared out evenly."""
        records.check_whole("devices", devices, 1, ClusterError)
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        device = Device(
            name="cpu process",
            type="cpu",
            memory_bytes=memory_bytes // devices,
            memory_bytes_per_s=10e9,
            float32_flops_per_s=50e9,
            bfloat16_flops_per_s=25e9,
        )
        return Cluster((Node(device, devices, Link(latency_s=100e-6, bytes_per_s=1e9)),), name=f"local, {devices} processes")

    @staticmethod
    def preset(name: str, nodes: int = 1, per_node: int | None = None, network: str | None = None) -> Cluster:
        """``nodes`` equal nodes of a known device, such as ``"a100-80"``; :func:`presets` lists the names.

        Args:
            per_node: devices in a node; default: as its maker sells it.
            network: what joins nodes, such as ``"infiniband-8x200"`` (cards per node x Gbit/s); default: the usual one for the device.

        Raises:
            ClusterError: unknown name, with the nearest one that exists.
        """
        records.check_whole("nodes", nodes, 1, ClusterError)
        if per_node is not None:
            records.check_whole("per_node", per_node, 1, ClusterError)
        found = device_preset(name)
        joined = network_preset(network or found.network)
        node = replace(found.node, uplinks=joined.uplinks)
        if per_node is not None:
            node = replace(node, count=per_node, uplinks=max(1, min(joined.uplinks, joined.uplinks * per_node // found.node.count)))
        shape = f"{nodes} x {node.count} {node.device.name}"
        return Cluster((node,) * nodes, joined.link, name=f"{shape}, {joined.name}" if nodes > 1 else shape)

    def to_json(self) -> str:
        return records.to_text({"version": VERSION, **records.encode(self)})

    @staticmethod
    def from_json(text: str) -> Cluster:
        """Inverse of :meth:`to_json`; raises :class:`ClusterError` naming the first thing that is wrong."""
        content = records.parse_json(text, "the cluster", ClusterError)
        if not isinstance(content, dict):
            raise ClusterError("the cluster is not a JSON object; expected the keys version and nodes")
        version = content.pop("version", None)
        if version != VERSION or isinstance(version, bool):
            raise ClusterError(f"the cluster has version {version!r}; this hgc reads version {VERSION}, as Cluster.save writes it")
        return records.decode(Cluster, content, "", ClusterError)

    def save(self, path: str | Path) -> None:
        """Write the description as JSON, whole or not at all."""
        records.write_text(path, self.to_json(), "cluster file", ClusterError)

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """Read what :meth:`save` wrote; raises :class:`ClusterError` naming the file and the first thing that is wrong."""
        text = records.read_text(path, "cluster file", ClusterError)
        try:
            return Cluster.from_json(text)
        except ClusterError as wrong:
            raise ClusterError(f"{path}: {wrong}") from None

    def __str__(self) -> str:
        lines = [f"{self.name}: {self.devices} device{'s' * (self.devices > 1)} on {len(self.nodes)} node{'s' * (len(self.nodes) > 1)}"]
        for node in sorted(set(self.nodes), key=self.nodes.index):
            device = node.device
            lines.append(
                f"  {self.nodes.count(node)} x {node.count} {device.name}: {device.memory_bytes / 2**30:.3g} GiB, "
                f"{device.float32_flops_per_s / 1e12:.3g} TFLOP/s float32, {node.link.bytes_per_s / 1e9:.3g} GB/s between devices"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class DevicePreset:
    """A device with its node, the network usually sold with it (a name), and where the numbers come from."""

    node: Node
    network: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class NetworkPreset:
    """What leads out of a node: ``uplinks`` cards with the rate of ``link``, and where the numbers come from."""

    name: str
    link: Link
    uplinks: int
    sources: tuple[str, ...]


T = TypeVar("T")


def presets(kind: str = "device") -> list[str]:
    """Names that :meth:`Cluster.preset` takes; ``kind`` is ``"device"`` or ``"network"``."""
    return sorted(file.name.removesuffix(".json") for file in preset_folder(kind).iterdir() if file.name.endswith(".json"))


def preset_folder(kind: str) -> Traversable:
    """Where the presets of a kind are packaged."""
    return resources.files("hgc") / "cost" / "presets" / f"{kind}s"


def device_preset(name: str) -> DevicePreset:
    """A packaged device with its node and sources; raises :class:`ClusterError` with the nearest name that exists."""
    return _read_preset("device", DevicePreset, name)


def network_preset(name: str) -> NetworkPreset:
    """A packaged network with its sources; raises :class:`ClusterError` with the nearest name that exists."""
    return _read_preset("network", NetworkPreset, name)


def _read_preset(kind: str, cls: type[T], name: str) -> T:
    known = presets(kind)
    if name not in known:
        word = str(name).lower()
        near = [word] if word in known else [option for option in known if name and option.startswith(word)]
        hint = f"did you mean {' or '.join(map(repr, near))}?" if near else records.suggestion(str(name), known)
        raise ClusterError(f"no {kind} is called {name!r}; {hint}")
    text = (preset_folder(kind) / f"{name}.json").read_text(encoding="utf-8")
    return records.decode(cls, records.parse_json(text, f"preset {name}", ClusterError), name, ClusterError)

"""The hardware a program is planned for, as plain data: ``Cluster`` of ``Node`` of ``Device``, joined by ``Link``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from hgc import records
from hgc.errors import ClusterError

VERSION = 1
DEVICE_TYPES = {"cpu": "gloo", "cuda": "nccl"}
"""Device type, as torch spells it -> the torch.distributed backend that serves it."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one process' share of a CPU. Speeds are peaks; what is reached is the cost model's affair."""

    name: str
    type: str
    memory_bytes: int
    memory_bytes_per_s: float
    float32_flops_per_s: float
    bfloat16_flops_per_s: float

    def __post_init__(self) -> None:
        if self.type not in DEVICE_TYPES:
            raise ClusterError(f"device type is {self.type!r}; expected one of {', '.join(DEVICE_TYPES)}")
        records.check_whole("memory_bytes", self.memory_bytes, 1, ClusterError)
        for name in ("memory_bytes_per_s", "float32_flops_per_s", "bfloat16_flops_per_s"):
            records.check_positive(name, getattr(self, name), ClusterError)


@dataclass(frozen=True)
class Link:
    """What joins devices: a message of ``n`` bytes takes ``latency_s + n / bytes_per_s`` seconds."""

    latency_s: float
    bytes_per_s: float

    def __post_init__(self) -> None:
        records.check_positive("latency_s", self.latency_s, ClusterError, zero=True)
        records.check_positive("bytes_per_s", self.bytes_per_s, ClusterError)


@dataclass(frozen=True)
class Node:
    """A machine with ``count`` equal devices, each pair of which is joined by ``link``."""

    device: Device
    count: int
    link: Link

    def __post_init__(self) -> None:
        records.check_whole("count", self.count, 1, ClusterError)


@dataclass(frozen=True)
class Cluster:
    """Nodes joined by one kind of ``link`` (``None`` for a single node). Ranks are numbered node by node."""

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

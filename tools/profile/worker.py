"""One rank of a measurement: ``torchrun --nproc-per-node N [--nnodes M ...] -m hgc.tools.profile -o cluster.json`` runs it everywhere."""

from __future__ import annotations

import os
import platform

import torch
import torch.distributed as dist

from hgc.errors import ClusterError
from hgc.tools.profile import kernels, links, sharded
from hgc.tools.profile.fit import Measured

DTYPES = ("float32", "bfloat16")
TOLD = {"cpu": "float32", "cuda": "bfloat16"}
"""In which the constants of kernels are found, by device; of the other dtype only the peak, from the products with most rows."""


def measure() -> Measured:
    """Time kernels and collectives on all ranks of the running job; raises :class:`ClusterError` unless all nodes have as many ranks."""
    device = _start()
    world, per_node = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    if world % per_node:
        raise ClusterError(f"{world} ranks do not fill nodes of {per_node}; start as many ranks on every node")
    nodes = world // per_node
    on_gpu = device.type == "cuda"
    shapes = kernels.GPU_SHAPES if on_gpu else kernels.CPU_SHAPES
    told = TOLD[device.type]
    peaks = [shape for shape in shapes if shape[0] == shapes[-1][0]]
    dtype = getattr(torch, told)
    return Measured(
        name=torch.cuda.get_device_name(device) if on_gpu else f"{platform.machine()} process",
        type=device.type,
        memory_bytes=_memory_bytes(device, per_node),
        units=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1,
        nodes=nodes,
        per_node=per_node,
        launch_s=kernels.launch_s(device),
        unit_s=0.0 if on_gpu else sharded.unit_s(per_node),
        moved=kernels.moved(device, dtype, kernels.GPU_ELEMENTS if on_gpu else kernels.CPU_ELEMENTS),
        products={name: kernels.products(device, getattr(torch, name), shapes if name == told else peaks) for name in DTYPES},
        inside=tuple(links.sweeps(device, _group(nodes, per_node, inside=True), 1, per_node)) if per_node > 1 else (),
        between=tuple(links.sweeps(device, _group(nodes, per_node, inside=False), nodes, per_node)) if nodes > 1 else (),
    )


def _start() -> torch.device:
    if "RANK" not in os.environ:
        raise ClusterError("a measurement runs on every rank of a job; start it with torchrun, or use hgc profile on one machine")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return device


def _memory_bytes(device: torch.device, per_node: int) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // per_node


def _group(nodes: int, per_node: int, inside: bool) -> dist.ProcessGroup:
    """The ranks of this rank's node, or those with its place on every node."""
    members = [[node * per_node + place for place in range(per_node)] for node in range(nodes)]
    if not inside:
        members = [list(column) for column in zip(*members, strict=True)]
    group = dist.new_subgroups_by_enumeration(members)[0]  # type: ignore[no-untyped-call]
    assert isinstance(group, dist.ProcessGroup)
    return group

"""What follows the last backward: the norm of gradients, the optimizer."""

from __future__ import annotations

import math

from hgc.backends.simulator.units import Traffic
from hgc.backends.simulator.work import OPTIMIZER, Step
from hgc.cluster import Device
from hgc.cost.compute import memory_time_s
from hgc.cost.memory import OPTIMIZER_COPIES
from hgc.cost.traffic import optimizer_bytes, optimizer_s

NONE = "none"
"""No optimizer: gradients are the end of the step."""
TENSORS_PER_KERNEL = 100
"""About as many as ``torch._foreach`` operators take in one kernel on CUDA."""
CLIP_KERNELS = 3
"""The norm, and the scaling, of a group of gradients."""


def optimizer_step(traffic: Traffic, device: Device, optimizer: str, fused: bool, clip: bool) -> Step:
    """The optimizer's work on a rank's share of the trained parameters, bound by memory. Raises ``HgcError`` for an unknown optimizer."""
    if optimizer == NONE:
        return Step(0.0, OPTIMIZER, optimizer)
    shares = traffic.shares
    # on a CPU torch goes parameter by parameter, and what one operator has touched is in a cache when the next one needs it
    once = fused or device.type == "cpu"
    moved = optimizer_bytes(traffic.program, traffic.strategy, traffic.precision, optimizer, traffic.execution, fused=once, clipping=clip)
    operators = 1 if fused else 1 + 3 * OPTIMIZER_COPIES[optimizer]
    groups = math.ceil(len(shares.trained) / TENSORS_PER_KERNEL) if device.type == "cuda" else len(shares.trained)
    return Step(optimizer_s(float(moved), device, (operators + CLIP_KERNELS * clip) * groups), OPTIMIZER, optimizer)


def accumulation_s(traffic: Traffic, device: Device, fused: bool) -> float:
    """Seconds in which a micro-batch after the first adds its gradients to the sums: a pass over new gradients and twice over the sums.

    ``fused``: the product that makes a gradient reads and writes the sum instead of writing it, and that is counted with the product.
    """
    shares, moved = traffic.shares, 0.0
    for entry in shares.trained:
        elements = float(shares.held_numel(entry) if traffic.strategy.zero >= 2 else shares.local_numel(entry))
        new, added = entry.value.dtype.itemsize, 2 * shares.summed(entry)
        moved += elements * (max(added - new, 0) if fused else added + new)
    groups = 0 if fused else math.ceil(len(shares.trained) / TENSORS_PER_KERNEL)
    return float(memory_time_s(device, moved, float(groups))) if moved else 0.0


def moving_s(device: Device, bytes_: float, tensors: int) -> float:
    """Seconds in which FSDP2 packs or unpacks tensors around a collective, where no stream of its own does: bytes read and written."""
    return float(memory_time_s(device, bytes_, float(tensors)))

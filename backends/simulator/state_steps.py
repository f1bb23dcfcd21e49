"""What follows the last backward: tied gradients, the norm, the optimizer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hgc.backends.simulator.units import StateTraffic, is_trained, kept_dtype
from hgc.backends.simulator.work import OPTIMIZER, Step
from hgc.cluster import Device
from hgc.cost.compute import memory_time_s
from hgc.cost.memory import share_bytes
from hgc.errors import HgcError


@dataclass(frozen=True)
class Passes:
    """How often an optimizer reads or writes an element of a parameter's size: operator by operator, as ``torch.optim`` does, or fused.

    ``operators``: kernels for each tensor, or for each group of tensors.
    """

    eager: int
    fused: int
    operators: int


OPTIMIZERS: Mapping[str, Passes] = {
    "none": Passes(0, 0, 0),
    "sgd": Passes(3, 3, 1),
    "momentum": Passes(8, 5, 3),
    "adam": Passes(18, 7, 7),
    "adamw": Passes(20, 7, 8),
}
"""``adamw``: decay 2, mean 3, square 2 + 3, root 2, divide 2, add 2, update 4; fused: read all four, write three."""
TENSORS_PER_KERNEL = 100
"""About as many as ``torch._foreach`` operators take in one kernel on CUDA."""
CLIP_PASSES = 3
"""Read the gradient for its norm, read and write it to scale it."""


def optimizer_step(traffic: StateTraffic, device: Device, optimizer: str, fused: bool, clip: bool) -> Step:
    """The optimizer's work on a rank's share of the trained parameters, bound by memory. Raises ``HgcError`` for an unknown optimizer."""
    if optimizer not in OPTIMIZERS:
        raise HgcError(f"the optimizer {optimizer!r} is not known; expected one of {', '.join(OPTIMIZERS)}")
    passes = OPTIMIZERS[optimizer]
    precision = traffic.precision
    stored = precision.master or kept_dtype(precision)
    moved, tensors = 0.0, 0
    for entry in traffic.program.state.values():
        if is_trained(entry):
            elements = float(share_bytes(entry, traffic.program, traffic.is_sharded(entry))) / entry.value.dtype.itemsize
            itemsize = getattr(torch, stored).itemsize if stored else entry.value.dtype.itemsize
            moved += elements * itemsize * ((passes.fused if fused else passes.eager) + CLIP_PASSES * clip)
            tensors += 1
    kernels = (1 if fused else passes.operators) + CLIP_PASSES * clip
    groups = math.ceil(tensors / TENSORS_PER_KERNEL) if device.type == "cuda" else tensors
    return Step(float(memory_time_s(device, moved, float(kernels * groups))) if moved else 0.0, OPTIMIZER, optimizer)

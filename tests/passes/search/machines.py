"""Problems of the shape that Galvatron's profiles have: eight devices with PCIe or NVLink, a hundred-odd MiB a layer."""

from __future__ import annotations

from hgc.passes.sharding.search.galvatron import Layer, Machine, Training, pipeline
from hgc.passes.sharding.search.pipeline import Pipeline
from hgc.passes.sharding.search.space import trees

MIB = 2**20


def machine(devices: int, bytes_per_s: float) -> Machine:
    """Strided groups are a little slower."""
    powers = [1 << power for power in range(1, devices.bit_length())]
    all_reduce = {(ranks, near): bytes_per_s * (1.0 if near else 0.9) for ranks in powers for near in (True, False)}
    return Machine(devices, all_reduce, dict.fromkeys(powers, bytes_per_s), overlap=1.3)


def layer(hidden: int, sequence: int, flops_per_s: float, ratio: float = 1.0) -> Layer:
    """A transformer layer in float32; ``ratio``: of its time and activations to the usual one's."""
    parameters = 12 * hidden**2
    forward_s = (2 * parameters * sequence + 4 * sequence**2 * hidden) / flops_per_s * ratio
    apart, whole = 24 * hidden * sequence * 4 * ratio, 10 * hidden * sequence * 4 * ratio
    activations = {1 << power: whole + apart / (1 << power) for power in range(11)}
    return Layer(forward_s, parameters * 4, activations, hidden * sequence * 4, hidden * sequence * 4)


def problem(
    layers: tuple[Layer, ...], devices: int, stages: int, samples: int, micro_batches: int, limit_bytes: float, bytes_per_s: float = 8e9
) -> Pipeline:
    found = [tree for tree in trees(devices) if tree.stages == stages]
    return pipeline(layers, found, machine(devices, bytes_per_s), Training(samples, micro_batches), limit_bytes)

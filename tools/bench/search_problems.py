"""Search problems: of the shape that Galvatron's profiles have, from the sizes of well-known models; and small random ones."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hgc.passes.sharding.search.galvatron import Layer, Machine, Training, pipeline
from hgc.passes.sharding.search.pipeline import Pipeline
from hgc.passes.sharding.search.problem import Chain
from hgc.passes.sharding.search.space import trees

PCIE, NVLINK, BETWEEN = 8e9, 150e9, 20e9
"""Bytes a second of an all-reduce: eight RTX TITAN, eight A100, A100s of several nodes."""
PER_NODE = 8


@dataclass(frozen=True)
class Model:
    """Layers alike, trained in 16 or 32 bits on devices that reach ``flops_per_s``."""

    name: str
    layers: int
    hidden: int
    sequence: int
    flops_per_s: float
    bytes_per_s: float
    element_bytes: int


MODELS = (
    Model("BERT-Huge", 32, 1280, 512, 6e12, PCIE, 4),
    Model("ViT-Huge", 32, 1280, 196, 6e12, PCIE, 4),
    Model("GPT-6.7B", 32, 4096, 2048, 1.2e14, NVLINK, 2),
    Model("LLaMA-7B", 32, 4096, 4096, 1.2e14, NVLINK, 2),
)
LARGEST = Model("GPT 96 x 12288", 96, 12288, 2048, 1.2e14, NVLINK, 2)


def machine(devices: int, bytes_per_s: float) -> Machine:
    """Nodes of eight. Strided groups are a little slower inside a node, and cross nodes as soon as there are several."""
    powers = [1 << power for power in range(1, devices.bit_length())]

    def bandwidth(ranks: int, *, neighbours: bool) -> float:
        inside = ranks <= PER_NODE if neighbours else devices <= PER_NODE
        return bytes_per_s * (1.0 if neighbours else 0.9) if inside else min(BETWEEN, bytes_per_s)

    all_reduce = {(ranks, near): bandwidth(ranks, neighbours=near) for ranks in powers for near in (True, False)}
    between = bytes_per_s if devices <= PER_NODE else min(BETWEEN, bytes_per_s) / 2
    return Machine(devices, all_reduce, dict.fromkeys(powers, between), overlap=1.3)


def layer(hidden: int, sequence: int, flops_per_s: float, ratio: float = 1.0, element_bytes: int = 4) -> Layer:
    """A transformer layer; ``ratio``: of its time and activations to the usual one's."""
    parameters = 12 * hidden**2
    forward_s = (2 * parameters * sequence + 4 * sequence**2 * hidden) / flops_per_s * ratio
    output_bytes = hidden * sequence * element_bytes
    apart, whole = 24 * output_bytes * ratio, 10 * output_bytes * ratio
    activations = {1 << power: whole + apart / (1 << power) for power in range(11)}
    return Layer(forward_s, parameters * 4, activations, output_bytes, output_bytes)


def problem(
    layers: tuple[Layer, ...],
    devices: int,
    stages: int,
    samples: int,
    micro_batches: int,
    limit_bytes: float,
    bytes_per_s: float = PCIE,
    most_tp: int = PER_NODE,
) -> Pipeline:
    """Under the space ``"galvatron-bmw"``, tensor parallelism up to ``most_tp``."""
    found = [tree for tree in trees(devices) if tree.stages == stages and tree.degree("tp") <= most_tp]
    return pipeline(layers, found, machine(devices, bytes_per_s), Training(samples, micro_batches), limit_bytes)


def problems(model: Model, devices: int, samples: int, limit_bytes: float, most_stages: int = 8) -> list[Pipeline]:
    """All numbers of stages and of micro-batches (divisors of the batch up to 64, at least as many as stages)."""
    layers = (layer(model.hidden, model.sequence, model.flops_per_s, element_bytes=model.element_bytes),) * model.layers
    counts = [count for count in range(1, 65) if samples % count == 0]
    return [
        problem(layers, devices, stages, samples, count, limit_bytes, model.bytes_per_s)
        for stages in (1 << power for power in range(most_stages.bit_length()))
        if stages <= min(devices, model.layers)
        for count in counts
        if count >= stages
    ]


def random_chain(seed: int) -> Chain:
    """Up to six blocks and four strategies; whole memories; some lack strategies, some have ``passing``, some limits are too tight."""
    draw = np.random.default_rng(seed)
    blocks, strategies = int(draw.integers(1, 7)), int(draw.integers(1, 5))
    shape = blocks, strategies
    time_s = draw.uniform(1, 10, shape)
    if draw.random() < 0.3:
        time_s[draw.random(shape) < 0.2] = np.inf
    memory = draw.integers(0, 20, shape).astype(float)
    if draw.random() < 0.5:  # blocks alike, as layers are
        time_s[:], memory[:] = time_s[0], memory[0]
    switch_s = draw.uniform(0, 4, (max(blocks - 1, 0), strategies, strategies)) * draw.integers(0, 2)
    switch_s = np.where(np.eye(strategies, dtype=bool), 0.0, switch_s)
    passing = draw.integers(0, 8, shape).astype(float) if draw.random() < 0.5 else np.zeros((0, 0))
    lightest, heaviest = memory.min(axis=1).sum(), memory.max(axis=1).sum()
    limit = float(np.round(draw.uniform(lightest * 0.9, heaviest + 4)))
    return Chain(time_s, memory, switch_s, limit, passing)


def rounded(chain: Chain, share: float, steps: int) -> Chain:
    """A limit between the least memory (``share`` 0) and what the fastest choice takes (1), and memory in so many whole steps of it."""
    rows, fastest = np.arange(chain.blocks), chain.time_s.argmin(axis=1)
    least = float(np.where(np.isfinite(chain.time_s), chain.memory, np.inf).min(axis=1).sum())
    limit = least + share * (float(chain.memory[rows, fastest].sum()) - least)
    return Chain(chain.time_s, np.ceil(chain.memory / limit * steps), chain.switch_s, float(steps))

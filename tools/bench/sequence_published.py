"""What FlexSP (arXiv:2412.01523) and its release publish: constants of three models on 64 A100-40GB, and speed-ups."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hgc.errors import HgcError
from hgc.passes.sequence.baselines import Shape
from hgc.passes.sequence.costs import Fleet, Numbers, Ring, SequenceCosts, Sharding

MIB, GB = 2**20, 1e9
FLEET = Fleet(64, 8)
BANDWIDTHS = ((2, 119.5 * GB), (4, 104.1 * GB), (8, 96.5 * GB), (16, 10.33 * GB), (32, 5.94 * GB), (64, 4.87 * GB))
"""All-to-all, as the release ships it."""
MEMORY_BYTES = 30 * 2**30
"""What the release's sweep gives its solver of a device's 40 GB."""
NODE_BYTES_S = 50 * GB
"""400 Gbit/s of InfiniBand for each node, as the paper states."""
NVLINK_BYTES_S = 230 * GB
"""All-gather inside a node of A100 (bus bandwidth of large messages in NVIDIA's nccl-tests)."""


@dataclass(frozen=True)
class Model:
    """A row of the release's constants. ``parameters``: by longest sequence in K tokens, because positions are learned."""

    name: str
    hidden: int
    layers: int
    token_bytes: float
    quadratic_s: float
    linear_s: float
    fixed_s: float
    parameters: dict[int, float]

    @property
    def shape(self) -> Shape:
        return Shape(self.hidden, self.layers, NODE_BYTES_S, dict(BANDWIDTHS)[8])

    def costs(self, sharding: Sharding, ring: Ring | None = None) -> SequenceCosts:
        exchanged = 4 * 2 * self.layers * self.hidden * 2.0  # queries, keys, values and outputs, forward and backward, two bytes each
        return SequenceCosts(
            self.quadratic_s, self.linear_s, self.fixed_s, exchanged, BANDWIDTHS, self.token_bytes, MEMORY_BYTES, sharding, ring
        )

    def everywhere(self, limit_k: int, *, priced: bool = True) -> Sharding:
        """ZeRO-3 over all devices, 16 bytes a parameter; in each micro-batch two gathers and a sum pass every node's uplink (rings)."""
        count = self.parameters[limit_k]
        return Sharding(16 * count / FLEET.devices, 3 * 2 * count / NODE_BYTES_S if priced else 0.0)

    def in_nodes(self, limit_k: int) -> Sharding:
        """Parameters and their gradients (two bytes each) sharded inside nodes, optimizer (12 bytes) over all devices.

        Gathers and sums stay on NVLink; once a step every device sums its share of gradients with the other nodes and gathers parameters.
        """
        count, inside = self.parameters[limit_k], FLEET.node_devices
        nodes = FLEET.devices // inside
        gathered = 3 * 2 * count * (inside - 1) / inside / NVLINK_BYTES_S
        across = 2 * 2 * count / inside * (nodes - 1) / nodes / (NODE_BYTES_S / inside)
        return Sharding((2 + 2) * count / inside + 12 * count / FLEET.devices, gathered, across)

    def ring(self) -> Ring:
        return Ring(2 * 2 * self.hidden * self.layers, NODE_BYTES_S / FLEET.node_devices, FLEET.node_devices)


MODELS = (
    Model("GPT-7B", 4096, 32, 4.4804 * MIB, 5.128e-9, 183.96e-6, 0.6294, {192: 7.117 * 2**30, 384: 7.850 * 2**30}),
    Model("GPT-13B", 5120, 40, 4.2204 * MIB, 9.285e-9, 306.02e-6, 1.1326, {192: 13.116 * 2**30, 384: 14.032 * 2**30}),
    Model("GPT-30B", 6656, 60, 3.4174 * MIB, 15.426e-9, 803.57e-6, 2.7894, {192: 31.525 * 2**30, 384: 32.715 * 2**30}),
)
LAWS = {"CommonCrawl": (6.8, 1.6), "GitHub": (7.2, 1.5)}
"""Lognormal laws (of the natural logarithm) that satisfy what is published of these data; inferred, the lengths are not public."""
SPEEDUPS = {
    ("GPT-7B", "Wikipedia"): {192: (1.72, 1.98), 384: (1.46, 1.77)},
    ("GPT-7B", "CommonCrawl"): {192: (1.50, 1.66), 384: (1.42, 1.77)},
    ("GPT-7B", "GitHub"): {192: (1.45, 1.43), 384: (1.26, 1.47)},
    ("GPT-13B", "Wikipedia"): {192: (1.59, 1.79), 384: (1.43, 1.77)},
    ("GPT-13B", "CommonCrawl"): {192: (1.35, 1.55), 384: (1.37, 1.70)},
    ("GPT-13B", "GitHub"): {192: (1.40, 1.38), 384: (1.29, 1.63)},
    ("GPT-30B", "Wikipedia"): {192: (1.64, 1.95), 384: (1.53, 1.85)},
    ("GPT-30B", "CommonCrawl"): {192: (1.54, 1.58), 384: (1.33, 1.60)},
    ("GPT-30B", "GitHub"): {192: (1.44, 1.44), 384: (1.22, 1.40)},
}
"""Of FlexSP over DeepSpeed-Ulysses and over Megatron-LM, by longest sequence in K tokens: printed in its main figure."""


class Lengths:
    """Batches of sequence lengths; ``folder`` holds ``wikipedia_lengths.npy``. The same seed gives the same batches."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        path = folder / "wikipedia_lengths.npy"
        if not path.is_file():
            raise HgcError(f"{path} does not exist; --data names the folder with the sequence lengths")
        self._wikipedia = np.load(path).astype(np.float64)
        self._seed = seed

    def batch(self, name: str, limit_k: int, count: int, number: int) -> Numbers:
        """``count`` lengths below ``limit_k`` K tokens; longer ones are dropped, as the release does."""
        rng = np.random.default_rng([self._seed, number, limit_k, *name.encode()])
        drawn = rng.choice(self._wikipedia, 2 * count) if name not in LAWS else np.ceil(rng.lognormal(*LAWS[name], 2 * count))
        kept = drawn[drawn <= limit_k * 1024 - 2 * FLEET.devices]
        return np.asarray(kept[:count])

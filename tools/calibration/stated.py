"""Measurements of collectives that a source states one by one, outside the data files: each is a sweep of one message size."""

from __future__ import annotations

import numpy as np

from hgc.tools.calibration.points import Sweep

BENCHMARK_BYTES = 4e9
"""Message of BigScience's all_reduce_bench.py."""
GBIT_PER_S = 1e9 / 8


def _all_reduce(gpu: str, nodes: int, per_node: int, busbw_gbit_per_s: float, source: str) -> Sweep:
    """Seconds from the bus bandwidth, by the definition of nccl-tests."""
    ranks = nodes * per_node
    seconds = 2 * (ranks - 1) / ranks * BENCHMARK_BYTES / (busbw_gbit_per_s * GBIT_PER_S)
    return Sweep("all_reduce", gpu, ranks, nodes, "Omni-Path", "Ring", source, np.array([BENCHMARK_BYTES]), np.array([seconds]))


STATED = (
    # without the number of nodes; a ring's bus bandwidth hardly depends on it
    _all_reduce("A100", 4, 8, 140.0, "deepspeedai/DeepSpeed issue 2928, S. Bekman on the network of BLOOM-176B (Jean Zay)"),
    _all_reduce("V100-32GB", 4, 4, 84.7, "bigscience-workshop/bigscience experiments/bandwidth all_reduce_bench-32gb-4n"),
    _all_reduce("V100-32GB", 16, 4, 54.4, "bigscience-workshop/bigscience experiments/bandwidth n16_32gb_all_reduce_bench"),
)
"""Jean Zay's Omni-Path. On its A100 nodes the same benchmark had given 40.5 Gbit/s before their PCIe and NUMA settings were corrected
(``all_reduce_bench-a100-n4`` there): NCCL had found one of the four cards only."""

"""Compares the fitted model with timed transformer layers, which are built from several kernels and enter no fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from hgc.cluster import Device
from hgc.cost import compute
from hgc.tools.calibration.points import Array, read

TOKENS = 4 * 2048
GELU_PASSES = 16
"""Bias and GELU of the 4h-wide activations, as two kernels that read and write them, in passes over h-wide ones."""


def check(folder: Path, device: Device) -> Iterator[tuple[str, Array, Array]]:
    """Name, predicted seconds, measured seconds of groups of rows of ``transformer_layer_a100.csv`` that take 2 ms or more."""
    rows = read(folder, "transformer_layer_a100.csv")
    for degree in (1, 2, 4, 8):
        yield _mlp(device, rows, "h_sweep", degree)
    yield _mlp(device, rows, "tensor_parallel_h_sweep", 1)
    yield _mlp(device, rows, "flash_attn_hsweep", 1)


def mlp_time_s(device: Device, hidden: Array, degree: int, fused: bool) -> Array:
    """Two products of an MLP of four times the width on ``degree`` ranks; beside them bias and GELU, unless ``fused``."""
    tokens = np.full_like(hidden, TOKENS)
    width = 4 * hidden / degree
    up = compute.matmul_time_s(device, tokens, width, hidden, dtype="float16")
    total = up + compute.matmul_time_s(device, tokens, hidden, width, dtype="float16")
    return total if fused else total + compute.memory_time_s(device, GELU_PASSES * 2 * tokens * hidden / degree, 2.0)


def _mlp(device: Device, rows: list[dict[str, str]], sweep: str, degree: int) -> tuple[str, Array, Array]:
    chosen = [row for row in rows if row["sweep"] == sweep and row["tp"] == str(degree) and float(row["mlp_s"]) >= 2e-3]
    hidden = np.array([float(row["hidden"]) for row in chosen])
    measured = np.array([float(row["mlp_s"]) for row in chosen])
    kind = chosen[0]["kind"]
    return f"MLP, {sweep}, tp {degree}, {kind}", mlp_time_s(device, hidden, degree, kind == "sum_of_ops"), measured

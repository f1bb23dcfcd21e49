"""How long kernels run on a device: products by a roofline with tiles and waves, the rest by the bytes that it moves.

Everything takes numbers or numpy arrays (which broadcast) and returns seconds. The constants are ``Device.kernels``, fitted on
published microbenchmarks by ``hgc.tools.calibration``; docs/design/cost_models.md derives the formulas and lists residuals.
"""

from __future__ import annotations

from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from hgc import records
from hgc.cluster import Device
from hgc.errors import ClusterError

Numbers = TypeVar("Numbers", float, NDArray[np.float64])

ELEMENT_BYTES = {"float32": 4.0, "tfloat32": 4.0, "bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "float4": 0.5}
"""Data type -> bytes of one element. ``tfloat32`` is float32 data on tensor cores."""

TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Rows and columns of the output tiles that libraries choose from."""
RESULT_BYTES = 2.0
"""Products of 8 bits and less give 16 bits."""
ATTENTION_ROWS = 128
"""Queries, and keys, of one block of fused attention."""
HEAD_STEP = 16
"""Head sizes are padded to multiples of this."""
BACKWARD_PRODUCTS = 2.5
"""Products of fused attention's backward over its forward's: five (scores once more, and a gradient for each operand) over two."""


def peak_flops_per_s(device: Device, dtype: str) -> float:
    """Dense peak for products of ``dtype``; raises :class:`ClusterError` if the device has no units for it."""
    if dtype not in ELEMENT_BYTES:
        raise ClusterError(f"data type is {dtype!r}; {records.suggestion(dtype, ELEMENT_BYTES)}")
    peak = getattr(device, f"{dtype}_flops_per_s")
    if peak is None:
        raise ClusterError(f"{device.name} has no {dtype} units; choose another data type, or give {dtype}_flops_per_s in the cluster file")
    return float(peak)


def matmul_time_s(device: Device, m: Numbers, n: Numbers, k: Numbers, batch: Numbers | float = 1.0, dtype: str = "bfloat16") -> Numbers:
    """Seconds of ``batch`` products of (m, k) by (k, n).

    The output is cut into tiles, ``units`` at a time (a wave). A tile of ``p x q`` loads ``(p + q) * k`` elements while it computes
    ``2 * p * q * k`` FLOPs, then takes ``tile_s * p * q / 128^2``; the best tile shape counts. Reading and writing whole matrices
    once bounds the time from below, and ``launch_s`` is added.
    """
    kernels = device.kernels
    element_bytes = ELEMENT_BYTES.get(dtype, 0)
    share = kernels.float8_matmul_efficiency if element_bytes <= 1 else kernels.matmul_efficiency
    flops_per_s = peak_flops_per_s(device, dtype) * share / kernels.units
    loaded_per_s = kernels.cache_bytes_per_s / kernels.units
    rows, columns, inner, times = (np.asarray(value, dtype=np.float64) for value in (m, n, k, batch))
    aligned = _alignment(device, columns, inner, element_bytes)
    moved = (rows * inner + inner * columns) * element_bytes + rows * columns * max(element_bytes, RESULT_BYTES)
    moved_s = times * moved / _bandwidth(device)
    options = []
    for tile_m, tile_n in TILES:
        area = tile_m * tile_n
        main_s = np.maximum(2 * area * inner / (flops_per_s * aligned), (tile_m + tile_n) * inner * element_bytes / loaded_per_s)
        waves = _waves(device, np.ceil(rows / tile_m) * np.ceil(columns / tile_n) * times)
        options.append(_roofline(waves * (main_s + kernels.tile_s * area / 128**2), moved_s))
    return _like(kernels.launch_s + np.min(options, axis=0), m, n, k, batch)


def memory_time_s(device: Device, bytes_: Numbers, kernels: Numbers | float = 1.0) -> Numbers:
    """Seconds of ``kernels`` memory-bound kernels that read and write ``bytes_`` bytes altogether."""
    return _like(np.asarray(kernels) * device.kernels.launch_s + np.asarray(bytes_) / _bandwidth(device), bytes_, kernels)


def attention_time_s(
    device: Device,
    batch: Numbers,
    heads: Numbers,
    queries: Numbers,
    keys: Numbers,
    head_dim: Numbers,
    dtype: str = "bfloat16",
    *,
    pairs: Numbers | None = None,
    backward: bool = False,
) -> Numbers:
    """Seconds of fused attention: ``batch`` sequences, ``heads`` query heads of ``head_dim``.

    ``pairs`` (query, key) per head and sequence are computed, by default all; :func:`causal_pairs` and :func:`window_pairs` count
    those of masks. Each costs ``4 * head_dim`` FLOPs at the rate of products, and ``score_s / units``; the backward has 2.5 times
    the FLOPs, and twice the work on scores (the softmax again, and its gradient).
    """
    kernels, rounds = device.kernels, 2 if backward else 1
    flops_per_s = peak_flops_per_s(device, dtype) * kernels.matmul_efficiency
    rows, columns = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    of_head = rows * columns if pairs is None else np.asarray(pairs, dtype=np.float64)
    width = np.ceil(np.asarray(head_dim, dtype=np.float64) / HEAD_STEP) * HEAD_STEP
    score_s = 4 * width * (BACKWARD_PRODUCTS if backward else 1) / flops_per_s + rounds * kernels.score_s / kernels.units
    blocks = np.ceil(rows / ATTENTION_ROWS) * batch * heads
    busy_s = np.asarray(batch) * heads * of_head * score_s * (_waves(device, blocks) * kernels.units / blocks)
    moved = rounds * 2.0 * np.asarray(batch) * heads * (rows + columns) * head_dim * ELEMENT_BYTES[dtype]
    total_s = rounds * kernels.launch_s + _roofline(busy_s, moved / _bandwidth(device))
    return _like(total_s, batch, heads, queries, keys, head_dim)


def causal_pairs(queries: Numbers, keys: Numbers) -> Numbers:
    """(query, key) pairs per head that a causal kernel computes; queries are the last of the keys. Blocks on the diagonal are whole."""
    rows, columns = np.asarray(queries, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    return _like(np.minimum(rows * columns, rows * (columns - rows / 2 + ATTENTION_ROWS / 2)), queries, keys)


def window_pairs(queries: Numbers, keys: Numbers, window: Numbers) -> Numbers:
    """(query, key) pairs per head of causal attention to the ``window`` last keys; blocks on both edges are whole."""
    wide = np.asarray(queries, dtype=np.float64) * (np.asarray(window) + ATTENTION_ROWS)
    return _like(np.minimum(np.asarray(causal_pairs(queries, keys)), wide), queries, keys, window)


def _alignment(device: Device, columns: NDArray[np.float64], inner: NDArray[np.float64], element_bytes: float) -> NDArray[np.float64]:
    """Share of speed left by the start of rows in memory: multiples of 16 bytes load best."""
    worst = np.ones_like(columns + inner)
    for size in (columns, inner):
        row = size * element_bytes
        left = np.where(row % 16 == 0, 1.0, np.where(row % 4 == 0, device.kernels.half_aligned, device.kernels.unaligned))
        worst = np.minimum(worst, left)
    return worst


def _waves(device: Device, tiles: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rounds in which ``units`` work off the tiles: at least one; between the exact quotient and its ceiling."""
    exact = tiles / device.kernels.units
    sharpness = device.kernels.wave_sharpness
    return np.maximum(1.0, (1 - sharpness) * exact + sharpness * np.ceil(exact))


def _bandwidth(device: Device) -> float:
    return device.memory_bytes_per_s * device.kernels.memory_efficiency


def _roofline(compute_s: NDArray[np.float64], memory_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The longer of two, a little more where they are equal, for overlap is not perfect there."""
    return (compute_s**4 + memory_s**4) ** 0.25


def _like(result: NDArray[np.float64], *inputs: object) -> Numbers:  # type: ignore[type-var]
    """A float if all inputs were numbers, else the array."""
    return cast(Numbers, result if any(isinstance(value, np.ndarray) for value in inputs) else float(result))

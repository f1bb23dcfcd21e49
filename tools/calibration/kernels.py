"""Fits ``Kernels`` of devices to timed products of matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hgc.cluster import Device, Kernels
from hgc.cost import compute
from hgc.tools.calibration.points import Array, Products, products, read

LAUNCH_S = 2e-6
"""Least time of a small kernel, nominal: the data cannot tell it from the benchmark's own overhead, which is fitted and dropped."""
START = {
    "matmul_efficiency": 0.8,
    "float8_matmul_efficiency": 0.75,
    "tile_s": 2e-6,
    "cache_bytes_per_s": 6e12,
    "wave_sharpness": 0.7,
    "half_aligned": 0.6,
    "unaligned": 0.3,
    "memory_efficiency": 0.85,
}
SEARCHED = {"h100": "H100", "h800": "H100", "h200": "H100", "b200": "B200", "b300": "B300", "gb200": "GB200", "gb300": "GB200"}
"""Preset -> GPU whose best rate over a search of shapes it takes."""
SWEEPS = ("sweep", "transformer_op", "alignment_effect")
"""Kinds of rows that list shapes of one benchmark."""
SOURCES = {
    "a100": "kernels fitted to matmul_efficiency.csv: EleutherAI/cookbook@27dff48 on A100",
    "a800": "kernels as A100: the same chip",
    "h100-96": "kernels as H100: shares of the lower peak",
    "v100": "kernels fitted to matmul_efficiency.csv: EleutherAI/cookbook@27dff48 on V100; memory, alignment as A100",
    "rtx4": "kernels as A100: no measurement of this device was read",
    "other": "kernels fitted to matmul_efficiency.csv: DeepGEMM@a6d97a1 on H800, best rate of a search (ml-engineering@744d01e18b, MAMF)",
}
"""Start of a preset's name -> where its kernels come from."""
SHARES = tuple(name for name in START if name not in ("tile_s", "cache_bytes_per_s"))
SCORE_CYCLES = {"V100": 1 / 16 + 5 / 64, "A100": 1 / 16 + 5 / 64, "later": 1 / 16 + 5 / 128}
"""Cycles of one unit for a score's softmax: an exponential at 16 a cycle, five float32 operations at 64 or 128 a cycle (white papers)."""
CLOCK_HZ = {"V100": 1.53e9, "A100": 1.41e9, "H100": 1.83e9, "B200": 1.96e9, "4090": 2.52e9}
"""Boost clocks (white papers)."""


def fit(device: Device, points: Products, free: Sequence[str], dtype: str) -> tuple[Kernels, float]:
    """Constants named in ``free`` that bring predicted times nearest to measured ones, and the benchmark's overhead in seconds.

    Least squares of logarithms, soft beyond 10 %; a sweep of ``c`` points weighs as ``sqrt(c)``, so that long ones do not drown others.
    """
    sizes = Counter(points.groups)
    weight = np.array([sizes[name] ** -0.25 for name in points.groups])

    def unpack(logs: Array) -> tuple[Kernels, float]:
        values: dict[str, Any] = dict(zip(free, np.exp(logs).tolist(), strict=False))
        return replace(device.kernels, **values), float(np.exp(logs[-1]))

    def errors(logs: Array) -> Array:
        kernels, overhead_s = unpack(logs)
        return weight * np.log((predict(replace(device, kernels=kernels), points, dtype) + overhead_s) / points.measured_s)

    start = np.log([START[name] for name in free] + [15e-6])
    shifts = [np.zeros_like(start), np.array([np.log(0.25) if name == "cache_bytes_per_s" else 0.0 for name in (*free, "")])]
    most = [0.0 if name in SHARES else np.inf for name in free] + [np.inf]
    found = [
        least_squares(errors, start + shift, bounds=(-np.inf, most), loss="soft_l1", f_scale=0.1, x_scale=0.3, diff_step=1e-2, max_nfev=80)
        for shift in shifts
    ]
    return unpack(min(found, key=lambda result: float(result.cost)).x)


def predict(device: Device, points: Products, dtype: str) -> Array:
    """Seconds for each point."""
    return compute.matmul_time_s(device, points.m, points.n, points.k, points.batch, dtype)


Report = dict[str, tuple[Array, Products]]
"""Name -> predicted seconds, with the benchmark's overhead, beside the points."""


def calibrate(folder: Path, devices: dict[str, Device]) -> tuple[dict[str, Kernels], Report]:
    """Kernels for every preset on GPUs, and what the fits of those with sweeps are off by.

    A100 and V100 have sweeps in 16 bits, H800 a table in 8 bits (Hopper's tiles, waves and memory come from it). Others have the best
    rate over a search of shapes; such a rate is higher than a typical one by what A100's is over its fitted model.
    """
    rows = read(folder, "matmul_efficiency.csv")
    report: Report = {}
    a100 = _a100(rows, devices["a100-40"], report)
    v100 = _v100(rows, devices["v100-32"], a100, report)
    hopper = _hopper(rows, devices["h800"], a100, devices["a100-80"].bfloat16_flops_per_s, report)
    typical = _best_over_model(rows, "NVIDIA A100 SXM", "bf16", replace(devices["a100-80"], kernels=a100))
    found = {"a100-40": a100, "a100-80": a100, "v100-16": v100, "v100-32": v100, "rtx4090": a100, "a800": a100}
    for name, gpu in SEARCHED.items():
        grown = devices[name].bfloat16_flops_per_s / devices["h100"].bfloat16_flops_per_s
        found[name] = _searched(rows, gpu, devices[name], hopper, grown, typical)
    found["h100-96-500w"] = found["h100"]
    return {name: _finish(name, replace(kernels, units=devices[name].kernels.units)) for name, kernels in found.items()}, report


def _a100(rows: list[dict[str, str]], device: Device, report: Report) -> Kernels:
    points = products(rows, "NVIDIA A100 (40GB class)", SWEEPS)
    kernels, overhead_s = fit(device, points, [name for name in START if not name.startswith("float8")], "float16")
    report["A100"] = (predict(replace(device, kernels=kernels), points, "float16") + overhead_s, points)
    return kernels


def _v100(rows: list[dict[str, str]], device: Device, a100: Kernels, report: Report) -> Kernels:
    """Its sweeps have aligned sizes only, and none is bound by memory: those constants are A100's."""
    points = products(rows, "NVIDIA V100", SWEEPS)
    shared = replace(a100, units=device.kernels.units)
    free = ["matmul_efficiency", "tile_s", "cache_bytes_per_s", "wave_sharpness"]
    kernels, overhead_s = fit(replace(device, kernels=shared), points, free, "float16")
    report["V100"] = (predict(replace(device, kernels=kernels), points, "float16") + overhead_s, points)
    return kernels


def _hopper(rows: list[dict[str, str]], device: Device, a100: Kernels, a100_flops_per_s: float, report: Report) -> Kernels:
    points = products(rows, "NVIDIA H800 SXM", ("shape_table",), ("fp8",))
    cache_bytes_per_s = a100.cache_bytes_per_s * device.bfloat16_flops_per_s / a100_flops_per_s
    shared = replace(a100, units=device.kernels.units, cache_bytes_per_s=cache_bytes_per_s)
    free = ["float8_matmul_efficiency", "tile_s", "wave_sharpness", "memory_efficiency"]
    kernels, overhead_s = fit(replace(device, kernels=shared), points, free, "float8")
    report["H800, 8 bits"] = (predict(replace(device, kernels=kernels), points, "float8") + overhead_s, points)
    return kernels


def _searched(rows: list[dict[str, str]], gpu: str, device: Device, hopper: Kernels, grown: float, typical: float) -> Kernels:
    """Hopper's constants, with efficiencies that give the best rates of the search but for the share that is typically lost."""
    kernels = replace(hopper, matmul_efficiency=1.0, cache_bytes_per_s=hopper.cache_bytes_per_s * grown, units=device.kernels.units)
    if grown > 1:  # Blackwell: best rates are equal at inner sizes of 1024 and 3072, so nothing is lost at tiles' ends
        kernels = replace(kernels, tile_s=0.0, float8_matmul_efficiency=1.0)
        rate = _best_over_model(rows, f"NVIDIA {gpu} SXM", "fp8_e4m3", replace(device, kernels=kernels))
        kernels = replace(kernels, float8_matmul_efficiency=rate / typical)
    rate = _best_over_model(rows, f"NVIDIA {gpu} SXM", "bf16", replace(device, kernels=kernels))
    return replace(kernels, matmul_efficiency=rate / typical)


def _best_over_model(rows: list[dict[str, str]], gpu: str, dtype: str, device: Device) -> float:
    """Rate of the best shape of a search over what the model gives for that shape."""
    points = products([row for row in rows if row["dtype"] == dtype], gpu, ("max_over_shape_search",))
    return float((predict(device, points, {"bf16": "bfloat16", "fp8_e4m3": "float8"}[dtype]) / points.measured_s)[0])


def _finish(name: str, kernels: Kernels) -> Kernels:
    """Adds what is not fitted, and rounds to three digits."""
    maker = {"v100": "V100", "a100": "A100", "a800": "A100", "rtx4": "4090"}.get(name[:4], "B200" if "b" in name else "H100")
    score_s = SCORE_CYCLES.get(maker, SCORE_CYCLES["later"]) / CLOCK_HZ[maker]
    kernels = replace(kernels, launch_s=LAUNCH_S, score_s=score_s)
    rounded: dict[str, Any] = {field: float(f"{getattr(kernels, field):.3g}") for field in (*START, "score_s")}
    return replace(kernels, **rounded)

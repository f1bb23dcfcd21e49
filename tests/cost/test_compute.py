"""Compute model: rooflines with constants that make them exact, shapes that behave, and distance from published measurements."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc.cluster import Cluster, Device, Kernels
from hgc.cost import compute
from hgc.cost.compute import attention_time_s, causal_pairs, matmul_time_s, memory_time_s, window_pairs
from hgc.errors import ClusterError
from hgc.tools.calibration import __main__ as command
from hgc.tools.calibration import kernels, layers
from hgc.tools.calibration.points import products, read

SAMPLES = Path(__file__).parent / "samples"
IDEAL = Device("ideal", "cuda", 1, 1e12, 1e12, 1e14, kernels=Kernels(matmul_efficiency=1.0, memory_efficiency=1.0, launch_s=0.0))
A100 = Cluster.preset("a100-80").nodes[0].device
H100 = Cluster.preset("h100").nodes[0].device


def test_products_bound_by_compute_and_by_memory() -> None:
    assert matmul_time_s(IDEAL, 4096.0, 4096.0, 4096.0) == pytest.approx(2 * 4096**3 / 1e14, rel=1e-3)
    thin = (4096 * 64 + 64 * 4096 + 4096 * 4096) * 2
    assert matmul_time_s(replace(IDEAL, bfloat16_flops_per_s=1e18), 4096.0, 4096.0, 64.0) == pytest.approx(thin / 1e12, rel=1e-3)


def test_memory_and_launches() -> None:
    assert memory_time_s(IDEAL, 1e9) == pytest.approx(1e-3)
    assert memory_time_s(A100, 0.0, 3.0) == pytest.approx(3 * A100.kernels.launch_s)


def test_waves() -> None:
    device = replace(IDEAL, kernels=replace(IDEAL.kernels, units=100, wave_sharpness=1.0), memory_bytes_per_s=1e18)
    full, more = (matmul_time_s(device, 64.0 * tiles, 64.0, 8192.0) for tiles in (100, 101))
    assert more == pytest.approx(2 * full)


def test_rows_that_start_anywhere_are_slow() -> None:
    even, half, odd = (matmul_time_s(A100, 8192.0, 51200.0, size) for size in (14336.0, 14338.0, 14337.0))
    assert 1.4 < half / even < 1.8
    assert 3 < odd / even < 4


@settings(max_examples=100, deadline=None)
@given(
    m=st.integers(1, 300),
    n=st.integers(1, 300),
    k=st.integers(1, 300),
    batch=st.integers(1, 64),
    dtype=st.sampled_from(["bfloat16", "float16", "float32", "float8"]),
)
def test_products_never_beat_the_peaks(m: int, n: int, k: int, batch: int, dtype: str) -> None:
    seconds = matmul_time_s(H100, 16.0 * m, 16.0 * n, 16.0 * k, float(batch), dtype)
    flops = 2.0 * 16**3 * m * n * k * batch
    inputs = 256.0 * batch * (m * k + k * n) * compute.ELEMENT_BYTES[dtype]
    assert seconds >= max(flops / compute.peak_flops_per_s(H100, dtype), inputs / H100.memory_bytes_per_s, H100.kernels.launch_s)
    assert matmul_time_s(H100, 16.0 * m, 16.0 * n, 16.0 * k, 2.0 * batch, dtype) >= seconds


def test_arrays_and_numbers_agree() -> None:
    m = np.array([128.0, 4096.0, 8192.0])
    together = matmul_time_s(A100, m, m, m)
    assert together == pytest.approx([matmul_time_s(A100, size, size, size) for size in m.tolist()])


def test_attention() -> None:
    whole = attention_time_s(IDEAL, 1.0, 8.0, 4096.0, 4096.0, 128.0)
    assert whole == pytest.approx(4 * 8 * 4096**2 * 128 / 1e14, rel=1e-3)
    assert attention_time_s(IDEAL, 1.0, 8.0, 4096.0, 4096.0, 128.0, backward=True) == pytest.approx(2.5 * whole, rel=1e-3)
    pairs = causal_pairs(4096.0, 4096.0)
    assert pairs == 4096**2 / 2 + 4096 * 64
    assert window_pairs(4096.0, 4096.0, 8192.0) == pairs
    assert window_pairs(4096.0, 4096.0, 128.0) == 4096 * 256
    assert causal_pairs(1.0, 4096.0) == 4096


def test_a_type_without_units() -> None:
    with pytest.raises(ClusterError, match=re.escape("A100 SXM4 80GB has no float8 units; choose another data type")):
        matmul_time_s(A100, 1.0, 1.0, 1.0, dtype="float8")
    with pytest.raises(ClusterError, match=re.escape("data type is 'bf16'; did you mean 'bfloat16'?")):
        matmul_time_s(A100, 1.0, 1.0, 1.0, dtype="bf16")


@pytest.mark.parametrize(
    ("preset", "gpu", "kinds", "dtype", "median", "p90"),
    [
        ("a100-40", "NVIDIA A100 (40GB class)", kernels.SWEEPS, "float16", 0.045, 0.13),
        ("v100-32", "NVIDIA V100", kernels.SWEEPS, "float16", 0.12, 0.18),
        ("h800", "NVIDIA H800 SXM", ("shape_table",), "float8", 0.04, 0.12),
    ],
)
def test_published_products(preset: str, gpu: str, kinds: tuple[str, ...], dtype: str, median: float, p90: float) -> None:
    """A100's and V100's short products (below 0.3 ms) are left out: the benchmark's own overhead is in them."""
    points = products(read(SAMPLES, "matmul_efficiency.csv"), gpu, kinds)
    points = points if dtype == "float8" else points.select(points.measured_s > 3e-4)
    predicted = kernels.predict(Cluster.preset(preset).nodes[0].device, points, dtype)
    errors = np.abs(predicted / points.measured_s - 1)
    assert len(errors) >= 10
    assert np.median(errors) <= median
    assert np.quantile(errors, 0.9) <= p90


def test_layers_that_no_fit_has_seen() -> None:
    ratios = [
        np.abs(predicted / measured - 1) for _, predicted, measured in layers.check(SAMPLES, Cluster.preset("a100-40").nodes[0].device)
    ]
    errors = np.concatenate(ratios)
    assert len(errors) >= 20
    assert np.median(errors) <= 0.04
    assert np.quantile(errors, 0.9) <= 0.1


def test_calibration_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(SAMPLES)]) == 0
    assert "H800, 8 bits" in capsys.readouterr().out


def test_calibration_without_data(tmp_path: Path, capsys: Any) -> None:
    assert command.main([str(tmp_path)]) == 2
    assert "matmul_efficiency.csv' does not exist; check the path" in capsys.readouterr().err

"""``hgc profile``: what it writes loads, and its fit finds constants that made the measurements."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hgc.cluster import Cluster, Device, Kernels, Link, Node
from hgc.cost import compute
from hgc.cost.collectives import Kind, place, time_s
from hgc.tools.calibration import kernels as calibrated
from hgc.tools.calibration.points import Products, Sweep
from hgc.tools.cli import main
from hgc.tools.profile import fit
from hgc.tools.profile.kernels import CPU_SHAPES, Moved

INSIDE = Link(latency_s=50e-6, bytes_per_s=2e9, base_s=100e-6, efficiency=1.0, exchange_efficiency=0.5)
BETWEEN = Link(latency_s=200e-6, bytes_per_s=25e6, base_s=300e-6, efficiency=1.0, exchange_efficiency=1.0)
DEVICE = Device(
    name="made up",
    type="cpu",
    memory_bytes=2**30,
    memory_bytes_per_s=8e9,
    float32_flops_per_s=60e9,
    bfloat16_flops_per_s=30e9,
    kernels=Kernels(units=1, matmul_efficiency=1.0, cache_bytes_per_s=1e12, memory_efficiency=1.0, launch_s=5e-6),
)
NODE = Node(DEVICE, 2, INSIDE)


def _products(dtype: str) -> Products:
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*CPU_SHAPES, strict=True))
    blank = Products(m, n, k, np.ones_like(m), np.ones_like(m), ("made up",) * len(m))
    return replace(blank, measured_s=calibrated.predict(DEVICE, blank, dtype))


KINDS: tuple[Kind, ...] = ("all_reduce", "all_gather", "all_to_all", "send")


def _sweeps(ranks: tuple[int, ...], nodes: int) -> tuple[Sweep, ...]:
    """What a group of the cluster would measure while the other group is as busy, as the simulator has it."""
    where = place(Cluster((NODE, NODE), BETWEEN), ranks)
    sizes = np.array([2.0**power for power in (10, 14, 18, 20, 22)])
    return tuple(
        Sweep(kind, "", 2, nodes, "", "", "made up", sizes, np.array([time_s(kind, size, where) for size in sizes.tolist()]), NODE.count)
        for kind in KINDS
    )


@pytest.fixture(scope="module")
def measured() -> fit.Measured:
    moved = np.array([1e5, 1e6, 1e7])
    return fit.Measured(
        name="made up",
        type="cpu",
        memory_bytes=2**30,
        units=1,
        nodes=2,
        per_node=2,
        launch_s=5e-6,
        unit_s=1e-3,
        moved=Moved(moved, np.asarray(compute.memory_time_s(DEVICE, moved))),
        products={dtype: _products(dtype) for dtype in ("float32", "bfloat16")},
        inside=_sweeps((0, 1), 1),
        between=_sweeps((0, 2), 2),
    )


def test_the_fit_finds_what_made_the_measurements(measured: fit.Measured) -> None:
    cluster, residuals = fit.cluster(measured)
    assert max(each.median for each in residuals) < 0.03
    assert cluster.devices == 4
    assert cluster.nodes[0].device.memory_bytes_per_s == pytest.approx(8e9, rel=0.01)
    assert cluster.nodes[0].device.kernels.unit_s == 1e-3
    assert cluster.link is not None
    assert cluster.link.bytes_per_s * cluster.link.efficiency == pytest.approx(25e6, rel=0.1)


def test_a_machine_that_the_formulas_do_not_describe_shows_in_the_residuals(measured: fit.Measured) -> None:
    odd = measured.products["float32"]
    noisy = replace(odd, measured_s=odd.measured_s * np.where(np.arange(len(odd.m)) % 2, 4.0, 1.0))
    _, residuals = fit.cluster(replace(measured, products={**measured.products, "float32": noisy}))
    assert next(each for each in residuals if each.what.startswith("products")).median > 0.3


@pytest.mark.slow
def test_measuring_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = tmp_path / "here.json"
    assert main(["profile", "-o", str(path), "--devices", "2"]) == 0
    cluster = Cluster.load(path)
    device, link = cluster.nodes[0].device, cluster.nodes[0].link
    assert (cluster.devices, cluster.device_type) == (2, device.type)
    assert 1e9 < device.float32_flops_per_s < 1e15
    assert 1e8 < device.memory_bytes_per_s < 1e13
    assert 0 < device.kernels.launch_s < 1e-2
    assert 0 < device.kernels.unit_s < 1e-1
    assert link.bytes_per_s > 1e6


@pytest.mark.parametrize(("where", "sentence"), [("missing/here.json", "there is no folder"), ("", "is a folder; name the file to write")])
def test_mistakes_are_told_before_anything_is_measured(
    where: str, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "-o", str(tmp_path / where)]) == 2
    assert sentence in capsys.readouterr().err

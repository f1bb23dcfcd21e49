"""Plans that the search finds for 4 and 8 local devices, alike and unlike ones, compiled, emitted, and equal to the model.

The ordinary suite plays the ranks of a few on threads; all families on both numbers of devices, and some on processes, are slow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hgc
from hgc.cluster import Cluster
from hgc.compiler import Executable
from tests.families import FAMILIES
from tests.passes.search.test_unlike_devices import cluster

MODELS = ("gpt2", "llama", "bert", "t5", "vit", "cnn")
IN_STAGES = (*MODELS[:-1], "gpt2-odd-vocabulary")
"""Batch normalisation allows one micro-batch only, and so no pipeline."""
ROWS = 8


def _compiled(family: str, where: Cluster, **options: Any) -> Executable:
    """With a batch that eight devices can share."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    batch = {name: torch.cat([tensor.roll(index, -1) for index in range(ROWS // len(tensor))]) for name, tensor in batch.items()}
    return hgc.compile(model, batch, cluster=where, **options)


def _check(found: Executable, devices: int, ranks: str = "threads") -> None:
    assert found.plan.devices == devices
    report = found.verify(ranks=ranks, steps=3)
    assert report.ok, f"{found.plan}\n{report}; worst at {[each.where for each in report.differences]}"


@pytest.mark.parametrize(("family", "fix"), [("vit", {"pp": [1, 2]})])
def test_found_for_four_devices(family: str, fix: dict[str, object]) -> None:
    _check(_compiled(family, Cluster.local(4), fix=fix, time_limit_s=5), 4)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("family", MODELS)
def test_found(family: str, devices: int) -> None:
    _check(_compiled(family, Cluster.local(devices)), devices)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [4, 8])
@pytest.mark.parametrize("family", IN_STAGES)
def test_found_for_unlike_devices(family: str, devices: int) -> None:
    """The second half is three times as slow and has half the memory; a pipeline, in which that counts."""
    half = cluster(devices // 2, slower=3.0, memory=(1.0, 0.5))
    found = _compiled(family, half, fix={"pp": [2, 4]})
    assert len({stage.first_rank for stage in found.plan.stages}) in (2, 4)
    _check(found, devices)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama"])
def test_found_where_memory_binds(family: str) -> None:
    """With seven tenths of what the usual plan takes other plans are found, and run."""
    usual = _compiled(family, Cluster.local(4)).plan.predicted.memory_bytes
    assert usual
    share = 0.7 * usual / Cluster.local(2).nodes[0].device.memory_bytes
    found = _compiled(family, cluster(2, memory=(share, share)))
    assert (found.plan.predicted.memory_bytes or 0) <= 0.7 * usual
    _check(found, 4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_found_on_processes(family: str, tmp_path: Path) -> None:
    found = _compiled(family, Cluster.local(4))
    found.save(tmp_path / "out")
    _check(found, 4, ranks="processes")

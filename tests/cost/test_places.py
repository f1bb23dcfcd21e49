"""A job that keeps in step has the pace of its slowest device."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hgc.cluster import Cluster
from hgc.cost.places import in_step

DEVICE = Cluster.preset("h100").nodes[0].device


@pytest.mark.parametrize("devices", [2, 8, 64, 1024])
def test_the_expected_slowest_of_many(devices: int) -> None:
    """Against a sample: rates of so many devices, drawn 4,000 times."""
    drawn = np.random.default_rng(0).normal(size=(4000, devices)).max(axis=1).mean()
    slower = DEVICE.bfloat16_flops_per_s / in_step(DEVICE, devices).bfloat16_flops_per_s
    assert slower == pytest.approx(1 + DEVICE.deviation * drawn, abs=2e-3)


def test_one_device_waits_for_nobody() -> None:
    assert in_step(DEVICE, 1) == DEVICE


def test_equal_devices_have_no_slowest() -> None:
    equal = replace(DEVICE, deviation=0.0)
    assert in_step(equal, 512) == equal

"""What the state's copies and the optimizer take on a device."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hgc.backends.simulator.state_steps import moving_s, optimizer_step
from hgc.backends.simulator.units import Traffic
from hgc.cluster import Cluster, Device
from hgc.cost.execution import EAGER
from hgc.cost.traffic import optimizer_bytes
from tests.backends.simulator.test_simulate import plan_of, stages_of

CPU = Cluster.local(4).nodes[0].device
FREE = replace(CPU, kernels=replace(CPU.kernels, launch_s=0.0, memory_efficiency=1.0))


def test_packing_takes_its_bytes_and_a_launch_for_each_tensor() -> None:
    assert moving_s(FREE, 1e9, 7) == pytest.approx(1e9 / FREE.memory_bytes_per_s)
    assert moving_s(replace(FREE, kernels=replace(FREE.kernels, launch_s=1e-3)), 0.0, 7) == pytest.approx(7e-3)


@pytest.mark.parametrize(("device", "once"), [(FREE, True), (replace(FREE, type="cuda"), False)])
def test_on_a_cpu_an_optimizer_moves_each_tensor_once(device: Device, once: bool) -> None:
    plan = plan_of("dp4")
    (stage,) = stages_of(plan)
    traffic = Traffic(stage.program, plan.strategy, plan.precision, EAGER)
    moved = optimizer_bytes(stage.program, plan.strategy, plan.precision, "adamw", fused=once)
    step = optimizer_step(traffic, device, "adamw", fused=False, clip=False)
    assert step.seconds == pytest.approx(float(moved) / device.memory_bytes_per_s)

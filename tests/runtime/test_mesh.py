"""Meshes: who is in which group, and groups that are made once."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from hgc.errors import PlanError
from hgc.runtime.mesh import pick_device, start

PLAN = rt.PlanInfo({"pp": 2, "dp": 2, "tp": 2}, {}, data_axes=("dp",))
CPU = torch.device("cpu")


def members(mesh: rt.Mesh, *axes: str) -> list[int]:
    return dist.get_process_group_ranks(mesh.group(axes).handle)  # type: ignore[no-any-return]


def test_last_axis_is_fastest() -> None:
    def rank_main(rank: int) -> tuple[dict[str, int], list[list[int]]]:
        mesh = start(PLAN, CPU)
        return mesh.coordinates, [members(mesh, "pp"), members(mesh, "dp"), members(mesh, "tp"), members(mesh, "pp", "tp")]

    coordinates, groups = run_ranks(8, rank_main)[5]
    assert coordinates == {"pp": 1, "dp": 0, "tp": 1}
    assert groups == [[1, 5], [5, 7], [4, 5], [0, 1, 4, 5]]


def test_groups_are_made_once() -> None:
    def rank_main(rank: int) -> bool:
        return all(start(PLAN, CPU).group((axis,)).handle is start(PLAN, CPU).group((axis,)).handle for axis in PLAN.mesh)

    assert all(run_ranks(8, rank_main))


def test_the_whole_world_is_the_default_group() -> None:
    def rank_main(rank: int) -> bool:
        return start(rt.PlanInfo({"dp": 2, "tp": 1}, {}), CPU).group(("dp",)).handle is dist.group.WORLD

    assert all(run_ranks(2, rank_main))


def test_unknown_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match="device 'tpu' is unknown"):
        pick_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(PlanError, match="no GPU"):
        pick_device("cuda")

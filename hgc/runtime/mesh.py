"""The processes of a job as a mesh with named axes."""

from __future__ import annotations

import datetime
import gc
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from hgc._torch_compat import forget_shardings, local_store
from hgc.errors import PlanError
from hgc.ir.ops import groups
from hgc.runtime.plan_info import PlanInfo, describe_mesh


@dataclass
class Mesh:
    """This rank's view of the mesh: sizes and own coordinates by axis, device, and process groups.

    ``rank`` is the rank in the whole job, of which the mesh is the ranks from ``first_rank`` on.
    """

    sizes: dict[str, int]
    rank: int
    coordinates: dict[str, int]
    device: torch.device
    first_rank: int = 0
    _groups: dict[tuple[str, ...], groups.Group] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """How many ranks the mesh has."""
        return math.prod(self.sizes.values())

    def group(self, axes: tuple[str, ...]) -> groups.Group:
        """The group of all ranks that differ along ``axes`` only; all ranks of the mesh must ask for the same groups in the same order."""
        if axes not in self._groups:
            self._groups[axes] = groups.describe(_group_along(self, axes))
        return self._groups[axes]

    def known_groups(self) -> dict[tuple[str, ...], groups.Group]:
        """Axes -> group, of all that were asked for so far."""
        return dict(self._groups)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let operators find this mesh's groups."""
        with groups.use({axis: self.group((axis,)) for axis in self.sizes}):
            yield


# for each default group (a job has one, a thread that plays a rank has its own) all groups made so far, also those of other ranks
_made: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()


def _group_along(mesh: Mesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    everyone = groups_along(mesh.sizes, mesh.first_rank, axes)
    own = next(ranks for ranks in everyone if mesh.rank in ranks)
    if len(own) == dist.get_world_size():
        return world
    if own not in _made.get(world, {}):
        assert mesh.world == dist.get_world_size(), f"the groups along {axes} of a part of the job must be made by all ranks before"
        make_groups(everyone)
    group = _made[world][own]
    assert isinstance(group, dist.ProcessGroup)
    return group


def groups_along(sizes: Mapping[str, int], first_rank: int, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """The ranks of all groups along ``axes`` of the mesh over the ranks from ``first_rank`` on."""
    return [tuple(first_rank + place for place in places) for places in _members(sizes, axes)]


def make_groups(everyone: Iterable[tuple[int, ...]]) -> None:
    """Make those that do not exist yet; all ranks of the job must call it with the same groups in the same order."""
    world = dist.group.WORLD
    assert isinstance(world, dist.ProcessGroup)
    made = _made.setdefault(world, {})
    for ranks in everyone:
        if ranks not in made and len(ranks) < dist.get_world_size():
            made[ranks] = dist.new_group(list(ranks))


def _members(sizes: Mapping[str, int], axes: tuple[str, ...]) -> list[list[int]]:
    """Rank lists of all groups along ``axes``; ranks are numbered with the last mesh axis fastest."""
    strides: dict[str, int] = {}
    stride = 1
    for axis in reversed(list(sizes)):
        strides[axis], stride = stride, stride * sizes[axis]

    def offsets(chosen: list[str]) -> list[int]:
        return [sum(values) for values in itertools.product(*([i * strides[a] for i in range(sizes[a])] for a in chosen))]

    others = [axis for axis in sizes if axis not in axes]
    return [[first + offset for offset in offsets([a for a in sizes if a in axes])] for first in offsets(others)]


def pick_device(name: str = "auto") -> torch.device:
    """``"cpu"``, ``"cuda"`` (this process's GPU), or ``"auto"``: CUDA where there is any. Raises ``PlanError``."""
    if name not in ("auto", "cpu", "cuda"):
        raise PlanError(f"device {name!r} is unknown; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise PlanError("device 'cuda' was asked for, but torch sees no GPU here; use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def start(plan: PlanInfo, device: torch.device, timeout_s: float = 600.0) -> Mesh:
    """Join the job (unless the caller has) and lay the plan's mesh over it. Raises ``PlanError`` for another number of processes."""
    if not dist.is_initialized():
        _join(plan, device, timeout_s)
    world, rank = dist.get_world_size(), dist.get_rank()
    if world != plan.world:
        raise PlanError(
            f"the plan needs {plan.world} processes ({describe_mesh(plan.mesh)}) but this job has {world}; "
            f"start it with torchrun --nproc-per-node {plan.world}"
        )
    mesh = part_mesh(plan.mesh, 0, rank, device)
    groups.set_groups({axis: mesh.group((axis,)) for axis in plan.mesh})
    return mesh


def leave() -> None:
    """Leave the job, with every group that hgc holds, so that gloo's threads end before the interpreter does.

    A thread that still drops the tensors of a finished collective while Python shuts down aborts the process. The caller has let go of its
    trainer and optimizer.
    """
    if not dist.is_initialized():
        return
    groups.set_groups({})
    _made.pop(dist.group.WORLD, None)  # type: ignore[arg-type]
    forget_shardings()
    dist.destroy_process_group()
    gc.collect()


def part_mesh(sizes: Mapping[str, int], first_rank: int, rank: int, device: torch.device) -> Mesh:
    """The mesh over the ranks from ``first_rank`` on, of which ``rank`` is one; its groups exist, or all ranks of the job call it."""
    coordinates = {}
    rest = rank - first_rank
    for axis in reversed(list(sizes)):
        rest, coordinates[axis] = divmod(rest, sizes[axis])
    mesh = Mesh(dict(sizes), rank, coordinates, device, first_rank)
    for axis in sizes:
        mesh.group((axis,))
    return mesh


def _join(plan: PlanInfo, device: torch.device, timeout_s: float) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    elif plan.world == 1:
        dist.init_process_group(backend, timeout=timeout, store=local_store(), rank=0, world_size=1)
    else:
        raise PlanError(
            f"the plan needs {plan.world} processes ({describe_mesh(plan.mesh)}) but this is a single one; "
            f"start it with torchrun --nproc-per-node {plan.world}"
        )

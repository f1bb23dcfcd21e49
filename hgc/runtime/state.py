"""A rank's share of the model's state: allocation, initial values, and the way to and from whole tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hgc.errors import ArtifactError, PlanError
from hgc.ir.ops.collectives import stack_over
from hgc.runtime.mesh import Mesh
from hgc.runtime.modules import Declaration, Model
from hgc.runtime.plan_info import Normal, PlanInfo
from hgc.runtime.precision import Dtypes
from hgc.runtime.shards import Box, Layout, Split, all_coordinates, assemble, boxes, copy_from_whole, largest_numel, local_shape


@dataclass(frozen=True)
class Entry:
    """One parameter or buffer on this rank: how it is laid out, where it lives, over which axes its gradient is summed."""

    declared: Declaration
    layout: Layout
    held: tuple[Box, ...]
    sync: tuple[str, ...]
    places: tuple[tuple[nn.Module, str], ...]

    @property
    def name(self) -> str:
        return self.declared.name

    @property
    def is_parameter(self) -> bool:
        return self.declared.kind == "parameter"

    def module_tensor(self) -> Tensor:
        """What the module holds: a parameter, buffer, or the DTensor that FSDP2 made of it."""
        holder, leaf = self.places[0]
        found = (holder._parameters if self.is_parameter else holder._buffers)[leaf]
        assert found is not None
        return found

    def put(self, tensor: Tensor) -> None:
        """Place a tensor wherever the model holds this one."""
        for holder, leaf in self.places:
            if self.is_parameter:
                assert isinstance(tensor, nn.Parameter)
                holder._parameters[leaf] = tensor
            else:
                holder._buffers[leaf] = tensor

    def local(self) -> Tensor:
        """This rank's share as a plain tensor that shares memory with the model's."""
        return plain(self.module_tensor())


def plain(tensor: Tensor) -> Tensor:
    """The rank's own part of a DTensor (sharing memory), or the tensor itself; without history."""
    with torch.no_grad():
        found = tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()
    assert isinstance(found, Tensor)
    return found


def entries_of(model: Model, plan: PlanInfo, mesh: Mesh) -> list[Entry]:
    """All state of a model in order of declaration, parameters and buffers."""
    found = []
    for declared, places in model.declarations().values():
        split_axes = declared.layout.axes()
        unknown = next((axis for axis in (*split_axes, *(declared.sync or ())) if axis not in mesh.sizes), None)
        if unknown is not None:
            raise PlanError(f"{declared.name!r} names axis {unknown!r}, but the mesh has {list(mesh.sizes)}; correct the program")
        wanted = plan.summed_axes if declared.sync is None else declared.sync
        sync = tuple(axis for axis in mesh.sizes if axis in wanted and axis not in split_axes and mesh.sizes[axis] > 1)
        held = boxes(declared.layout, mesh.sizes, mesh.coordinates)
        found.append(Entry(declared, declared.layout, held, sync, places))
    return found


def fully_sharded(entry: Entry, axes: tuple[str, ...], mesh: Mesh) -> Entry:
    """The entry after FSDP2 has split dim 0 of the rank's part over ``axes``."""
    layout = replace(entry.layout, splits=(*entry.layout.splits, Split(axes, 0, uneven=True)))
    return replace(entry, layout=layout, held=boxes(layout, mesh.sizes, mesh.coordinates), sync=())


def allocate(entries: Iterable[Entry], mesh: Mesh, dtypes: Dtypes) -> None:
    """Give every entry its zero-filled local tensor, parameters as the optimizer updates them."""
    for entry in entries:
        declared = entry.declared
        chosen = dtypes.stored(declared.dtype, len(entry.layout.shape)) if entry.is_parameter else dtypes.other(declared.dtype)
        local = torch.zeros(local_shape(entry.layout, mesh.sizes, mesh.coordinates), dtype=chosen, device=mesh.device)
        entry.put(nn.Parameter(local, requires_grad=declared.requires_grad) if entry.is_parameter else local)


@torch.no_grad()
def fill(entries: Iterable[Entry], values: Mapping[str, Tensor], seed: int) -> None:
    """Set every entry from whole tensors by name, or where there is none from the declared initial values, alike under every plan."""
    for entry in entries:
        if entry.name in values:
            load_whole(entry, entry.local(), values[entry.name])
        elif not entry.declared.persistent:
            raise ArtifactError(f"the values of buffer {entry.name!r} are missing; keep the program's constants file next to it")
        else:
            copy_from_whole(entry.local(), _initial(entry.declared, seed), entry.held)


@torch.no_grad()
def load_whole(entry: Entry, local: Tensor, whole: Tensor) -> None:
    """Take this rank's part of a whole tensor into ``local``. Raises ``ArtifactError`` for another shape."""
    if tuple(whole.shape) != entry.layout.shape:
        raise ArtifactError(
            f"{entry.name!r} has shape {tuple(whole.shape)} in the given state but {entry.layout.shape} in the program; "
            f"use the state of the same model"
        )
    copy_from_whole(local, whole, entry.held)


def _initial(declared: Declaration, seed: int) -> Tensor:
    shape, init = declared.layout.shape, declared.init
    if init is None:
        init = _default_init(declared)
    if not isinstance(init, Normal):
        return torch.full(shape, init, dtype=declared.dtype)
    digest = hashlib.blake2b(f"{seed}|{declared.name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.randn(shape, generator=generator) * init.std


def _default_init(declared: Declaration) -> float | Normal:
    leaf = declared.name.rpartition(".")[2]
    if declared.kind == "buffer":
        return 1.0 if leaf == "running_var" else 0.0
    if len(declared.layout.shape) >= 2:
        return Normal()
    return 1.0 if leaf == "weight" else 0.0


@torch.no_grad()
def gather_whole(local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
    """The user's tensor from all ranks' shares, on every rank; all ranks must call it."""
    if not layout.axes():
        held = boxes(layout, mesh.sizes, mesh.coordinates)
        return held[0].of_local(local).clone() if held else local.new_empty(layout.shape)
    flat = local.new_zeros(largest_numel(layout, mesh.sizes))
    flat[: local.numel()] = local.reshape(-1)
    for axis in reversed(layout.axes()):
        group = mesh.group((axis,))
        flat = stack_over(flat, group.size, group.name) if group.size > 1 else flat.unsqueeze(0)
    return assemble(flat, layout, mesh.sizes)


def replicas(entry: Entry, mesh: Mesh) -> int:
    """How many ranks hold the same share of an entry."""
    distinct = sum(1 for _ in all_coordinates(entry.layout.axes(), mesh.sizes))
    return mesh.world // distinct

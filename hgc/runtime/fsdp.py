"""ZeRO through FSDP2: which parameters form a unit, sums instead of averages, and what is whole when."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from hgc.runtime.mesh import Mesh
from hgc.runtime.modules import Blocks, Model
from hgc.runtime.precision import Dtypes
from hgc.runtime.state import Entry, fully_sharded


@dataclass(frozen=True)
class Units:
    """Repeated blocks that are sharded one by one, and everything else, with the entries of each."""

    blocks: tuple[tuple[nn.Module, tuple[Entry, ...]], ...]
    root: tuple[Entry, ...]


def find_units(model: Model, entries: Iterable[Entry]) -> Units:
    """Every element of ``rt.blocks`` is a unit, unless it shares a tensor with another block."""
    candidates = [block for module in model.modules() if isinstance(module, Blocks) for block in module]
    owner = {id(module): index for index, block in enumerate(candidates) for module in block.modules()}
    owned: dict[int, list[Entry]] = {index: [] for index in range(len(candidates))}
    shared: Counter[int] = Counter()
    root: list[Entry] = []
    for entry in entries:
        owners = {owner.get(id(holder), -1) for holder, _ in entry.places}
        if len(owners) == 1 and -1 not in owners:
            owned[owners.pop()].append(entry)
        else:
            shared.update(owners)
            root.append(entry)
    for index in shared:
        root.extend(owned.pop(index, []))
    return Units(tuple((candidates[index], tuple(found)) for index, found in owned.items()), tuple(root))


def shard_model(
    model: Model,
    units: Units,
    axes: tuple[str, ...],
    mesh: Mesh,
    fill: Callable[[Iterable[Entry]], None],
    dtypes: Dtypes,
    zero: int,
) -> list[Entry]:
    """Fill and shard unit after unit, so that a rank never holds more than its share and one unit; returns the entries as they are now.

    With ``zero`` 3 a block's parameters are whole while it runs, with 1 and 2 from the first forward to the end of backward.
    """
    device_mesh = DeviceMesh.from_group(mesh.group(axes).handle, mesh.device.type)
    root_policy = _policy(dtypes, dtypes.parameters if dtypes.master is not None else None)
    # autocast blocks gather their matrices in its dtype; the root unit and all vectors feed the residual stream, which is as wide as them
    policy = root_policy if dtypes.narrow or dtypes.autocast is None else _policy(dtypes, dtypes.autocast)
    done: list[Entry] = []
    for block, entries in units.blocks:
        fill(entries)
        sharded = {entry.name for entry in entries if _can_shard(entry, axes, smallest_dim=1 if dtypes.autocast is None else 2)}
        done += _shard_unit(block, entries, sharded, axes, mesh, device_mesh, policy, zero)
    fill(units.root)
    sharded = {entry.name for entry in units.root if _can_shard(entry, axes, smallest_dim=2 if dtypes.narrow else 1)}
    done += _shard_unit(model, units.root, sharded, axes, mesh, device_mesh, root_policy, zero)
    for module in sharded_modules(model):
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo has no scaled sums, and a factor of one needs none
    return done


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The units of a model, none if it is not sharded."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def before_micro_batch(model: nn.Module, zero: int, last: bool) -> None:
    """What is whole until the next micro-batch: with ``zero`` 1 gradients and parameters, with 2 parameters; after the last nothing."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last or zero > 1)
        model.set_reshard_after_backward(last or zero > 2)


def release_gathered(model: nn.Module) -> None:
    """After a forward without a backward: units would keep their parameters while the optimizer changes them."""
    for module in sharded_modules(model):
        module.reshard()


def _policy(dtypes: Dtypes, gathered: torch.dtype | None) -> MixedPrecisionPolicy:
    """``gathered``: the dtype in which parameters are whole, ``None`` for that of the share. Sums are as wide as parameters if not said."""
    summed = dtypes.gradients if dtypes.gradients is not None or gathered is None else dtypes.parameters or torch.float32
    return MixedPrecisionPolicy(gathered, summed, cast_forward_inputs=False)


def _shard_unit(
    module: nn.Module,
    entries: Iterable[Entry],
    sharded: set[str],
    axes: tuple[str, ...],
    mesh: Mesh,
    device_mesh: DeviceMesh,
    policy: MixedPrecisionPolicy,
    zero: int,
) -> list[Entry]:
    entries = list(entries)
    held = [entry.module_tensor() for entry in entries if entry.name not in sharded]
    ignored = {parameter for parameter in held if isinstance(parameter, nn.Parameter)}
    fully_shard(module, mesh=device_mesh, reshard_after_forward=None if zero == 3 else False, mp_policy=policy, ignored_params=ignored)
    return [fully_sharded(entry, axes, mesh) if entry.name in sharded else entry for entry in entries]


def _can_shard(entry: Entry, axes: tuple[str, ...], smallest_dim: int) -> bool:
    return entry.is_parameter and entry.sync == axes and len(entry.layout.shape) >= smallest_dim

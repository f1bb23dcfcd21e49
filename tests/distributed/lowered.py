"""Run a lowered program rank by rank, as threads, without emission or runtime: what the transforms alone mean."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hgc.backends.parity.case import precision, to_dtype
from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.ir import ops
from hgc.ir.ops.layout import order_of, take
from hgc.ir.placement import Placement, Replicated, Shard, is_whole
from hgc.ir.program import Program
from hgc.ir.value import Value, info


def local_part(tensor: Tensor, value: Value, coordinates: Mapping[str, int], mesh: Mapping[str, int]) -> Tensor:
    """The rank's part of a whole tensor."""
    for axis, placement in value.placements:
        if isinstance(placement, Shard):
            tensor = take(tensor, placement.dim, coordinates[axis], mesh[axis], order_of(placement))
    return tensor.detach().clone()


def whole(parts: list[Tensor], coordinates: list[Mapping[str, int]], value: Value, mesh: Mapping[str, int]) -> Tensor:
    """Put a gradient together: shards joined, gradients of replicated state summed, invariant ones checked to agree."""
    placements = list(value.placements)
    pairs = list(zip(coordinates, parts, strict=True))
    while placements:
        axis, placement = placements.pop()
        groups: dict[tuple[Any, ...], list[Tensor]] = {}
        keys: dict[tuple[Any, ...], Mapping[str, int]] = {}
        for where, part in sorted(pairs, key=lambda pair: pair[0][axis]):
            key = tuple((a, i) for a, i in where.items() if a != axis)
            groups.setdefault(key, []).append(part)
            keys[key] = {a: i for a, i in where.items() if a != axis}
        pairs = [(keys[key], _join(found, placement)) for key, found in groups.items()]
    return pairs[0][1]


def _join(parts: list[Tensor], placement: Placement) -> Tensor:
    if isinstance(placement, Shard):
        return torch.cat(parts, placement.dim) if placement.is_plain else _strided(parts, placement)
    if placement == Replicated():
        return torch.stack(parts).sum(0)
    assert is_whole(placement)
    for part in parts[1:]:
        torch.testing.assert_close(part, parts[0], rtol=1e-9, atol=1e-12)
    return parts[0]


def _strided(parts: list[Tensor], placement: Shard) -> Tensor:
    count = len(placement.parts) if isinstance(placement.parts, tuple) else int(placement.parts)
    sizes = (
        [p // len(parts) for p in placement.parts]
        if isinstance(placement.parts, tuple)
        else [parts[0].size(placement.dim) // count] * count
    )
    pieces = [part.split(sizes, placement.dim) for part in parts]
    return torch.cat([pieces[r][i] for i in range(count) for r in range(len(parts))], placement.dim)


def run_lowered(program: Program, inputs: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and whole gradients by state name, from all ranks of ``program.mesh``."""
    mesh = program.mesh
    world = 1
    for size in mesh.values():
        world *= size
    dtype = next(t.dtype for t in state.values() if t.is_floating_point())
    values = {n.name: info(n).value for n in program.inputs()}
    known = dict(state)
    for entry in program.state.values():
        if entry.rows is not None:
            padding = int(entry.value.shape[0]) - entry.rows
            name = next(n for n in (entry.name, *entry.aliases) if n in known)
            known[entry.name] = torch.cat([known[name], known[name].new_zeros(padding, *known[name].shape[1:])])
        for alias in entry.aliases:
            known.setdefault(entry.name, known[alias]) if alias in known else None
        if entry.data is not None:
            known.setdefault(entry.name, to_dtype({"": entry.data}, dtype)[""])

    def rank(index: int) -> tuple[Mapping[str, int], Tensor, dict[str, Tensor]]:
        coordinates = _coordinates(index, mesh)
        with ops.use(mesh_groups(mesh)), precision(dtype):
            local = {n: local_part(t, program.state[n].value, coordinates, mesh) for n, t in known.items() if n in program.state}
            for name, tensor in local.items():
                tensor.requires_grad_(program.state[name].value.requires_grad)
            given = {n: local_part(t, values[n], coordinates, mesh) for n, t in inputs.items() if n in values}
            loss = program.run(given, local)
            loss.backward()
            return coordinates, loss.detach(), {n: t.grad for n, t in local.items() if t.grad is not None}

    results = run_ranks(world, rank)
    coordinates = [r[0] for r in results]
    names = results[0][2]
    gradients = {n: whole([r[2][n] for r in results], coordinates, program.state[n].value, mesh) for n in names}
    gradients = {n: g if program.state[n].rows is None else g[: program.state[n].rows] for n, g in gradients.items()}
    for result in results:
        torch.testing.assert_close(result[1], results[0][1])
    return results[0][1], gradients


def _coordinates(rank: int, mesh: Mapping[str, int]) -> dict[str, int]:
    found = {}
    for axis in reversed(list(mesh)):
        found[axis], rank = rank % mesh[axis], rank // mesh[axis]
    return {axis: found[axis] for axis in mesh}

"""Batches: what a data source yields, how a rank takes its part, and a synthetic source."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from hgc.errors import HgcError, ShardingError
from hgc.ir.ops.layout import order_of, take
from hgc.runtime.mesh import Mesh
from hgc.runtime.plan_info import Input, PlanInfo

Batch: TypeAlias = Mapping[str, Tensor]
"""Tensors by input name: the global batch, alike on every rank; or a :class:`LocalBatch`."""


class LocalBatch(dict[str, Tensor]):
    """A batch that holds this rank's part already."""


@dataclass(frozen=True)
class DataRequest:
    """What ``--data module:function`` is called with: ``function(request)`` returns an iterable of batches, starting with ``first_step``.

    ``sizes`` are the global sizes of the program's symbols (``{"B": 8, "S": 128}``); ``mesh`` and ``coordinates`` tell a source that
    reads only this rank's part (and yields :class:`LocalBatch`) which part that is.
    """

    sizes: Mapping[str, int]
    seed: int
    first_step: int
    mesh: Mapping[str, int]
    coordinates: Mapping[str, int]


class BatchError(HgcError):
    """A batch does not fit the program, or a data source is no data source."""


def local_batch(batch: Batch, plan: PlanInfo, mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of a batch on its device. Raises ``BatchError`` or ``ShardingError`` for one that does not fit."""
    check_names(batch, plan)
    if isinstance(batch, LocalBatch):
        return {name: to_device(batch[name], mesh.device) for name in plan.inputs}
    check_sizes(batch, plan)
    return {name: to_device(_own_part(name, batch[name], plan.inputs[name], mesh), mesh.device) for name in plan.inputs}


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; to a GPU through pinned memory, from which alone a copy does not hold up the host."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _own_part(name: str, tensor: Tensor, declared: Input, mesh: Mesh) -> Tensor:
    for axis, placement in declared.shards():
        ranks = mesh.sizes[axis]
        size = tensor.size(placement.dim)
        if size % ranks:
            raise ShardingError(
                f"input {name!r} has size {size} in dim {placement.dim}, which does not divide among the {ranks} ranks of axis {axis!r}; "
                f"use a multiple of {ranks}"
            )
        tensor = take(tensor, placement.dim, mesh.coordinates[axis], ranks, order_of(placement))
    return tensor.contiguous()


def check_names(batch: Batch, plan: PlanInfo) -> None:
    """Raise ``BatchError`` unless the batch is a mapping with exactly the program's inputs."""
    if not isinstance(batch, Mapping):
        raise BatchError(f"a batch is a dict of tensors by input name, not {type(batch).__name__}; the inputs are {list(plan.inputs)}")
    missing = [name for name in plan.inputs if name not in batch]
    unknown = [name for name in batch if name not in plan.inputs]
    if missing or unknown:
        what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which is no input"
        raise BatchError(f"the batch {what}; the inputs of the program are {list(plan.inputs)}")


def check_sizes(batch: Batch, plan: PlanInfo) -> dict[str, int]:
    """Global sizes of all symbols. Raises ``BatchError`` for a wrong rank, dtype or size, or one outside the range that was traced."""
    sizes: dict[str, int] = {}
    for name, declared in plan.inputs.items():
        tensor = batch[name]
        if tensor.dim() != len(declared.shape):
            raise BatchError(f"input {name!r} has shape {tuple(tensor.shape)}, expected {len(declared.shape)} dims {_dims(declared)}")
        if tensor.dtype != declared.dtype:
            raise BatchError(f"input {name!r} is {tensor.dtype}, but the program was traced with {declared.dtype}; convert the batch")
        for dim, expected in enumerate(declared.shape):
            if expected in plan.symbols and sizes.setdefault(str(expected), tensor.size(dim)) != tensor.size(dim):
                meaning = plan.symbols[str(expected)].meaning
                raise BatchError(
                    f"input {name!r} has {meaning} size {tensor.size(dim)}, but another input has {sizes[str(expected)]}; "
                    f"give all inputs of a batch the same {meaning} size"
                )
    check_ranges(sizes, plan)
    check_assumptions(sizes, plan)
    for name, declared in plan.inputs.items():
        wanted = shape_of(declared, sizes)
        if tuple(batch[name].shape) != wanted:
            raise BatchError(f"input {name!r} has shape {tuple(batch[name].shape)}, but the program needs {wanted}: {_dims(declared)}")
    return sizes


def check_ranges(sizes: Mapping[str, int], plan: PlanInfo) -> None:
    """Raise ``BatchError`` for a symbol outside the range that tracing found legal."""
    for name, size in sizes.items():
        symbol = plan.symbols[name]
        if size < symbol.low or (symbol.high is not None and size > symbol.high):
            upto = f"{symbol.low} to {symbol.high}" if symbol.high is not None else f"{symbol.low} or more"
            raise BatchError(f"{symbol.meaning} size {size} ({name}) is outside what the program was traced for; use {upto}")


def check_assumptions(sizes: Mapping[str, int], plan: PlanInfo) -> None:
    """Raise ``BatchError`` for sizes that break a relation the program rests on."""
    for relation in plan.assumptions:
        import sympy  # rare, and slow to import

        if not sympy.sympify(relation, locals={name: sympy.Integer(size) for name, size in sizes.items()}):
            given = ", ".join(f"{plan.symbols[name].meaning} ({name}) {size}" for name, size in sizes.items() if name in relation)
            raise BatchError(f"the program needs {_in_words(relation)}, but the batch has {given}; pad the batch or compile for its sizes")


def _in_words(relation: str) -> str:
    """``Eq(Mod(S, 2), 0)`` as a person says it."""
    match = re.fullmatch(r"Eq\(Mod\((.+), (\d+)\), 0\)", relation)
    return f"{match[1]} to be a multiple of {match[2]}" if match else relation


def _dims(declared: Input) -> str:
    return "[" + ", ".join(map(str, declared.shape)) + "]"


def shape_of(declared: Input, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The input's global shape for given sizes of the symbols."""
    return tuple(_size(entry, sizes) for entry in declared.shape)


def _size(entry: int | str, sizes: Mapping[str, int]) -> int:
    if isinstance(entry, int):
        return entry
    if entry in sizes:
        return sizes[entry]
    import sympy  # rare, and slow to import

    return int(sympy.sympify(entry, locals=dict(sizes)))


def micro_batches(local: Mapping[str, Tensor], count: int, plan: PlanInfo) -> list[dict[str, Tensor]]:
    """Split a rank's rows in order into ``count`` parts; inputs without a batch dim are in every part."""
    if count == 1:
        return [dict(local)]
    batch = plan.symbol("batch")
    if batch is None:
        raise BatchError(f"{count} micro-batches need a batch size that the program leaves open, but it was traced with fixed sizes")
    parts: list[dict[str, Tensor]] = [{} for _ in range(count)]
    for name, tensor in local.items():
        shape = plan.inputs[name].shape
        if batch not in shape:
            for part in parts:
                part[name] = tensor
            continue
        dim = shape.index(batch)
        if tensor.size(dim) % count:
            raise BatchError(f"a rank's {tensor.size(dim)} rows of input {name!r} do not divide into {count} micro-batches; change either")
        for part, piece in zip(parts, tensor.chunk(count, dim), strict=True):
            part[name] = piece
    return parts


def synthetic(request: DataRequest, plan: PlanInfo) -> Iterator[Batch]:
    """Endless random global batches, a function of the seed and the step alone."""
    step = request.first_step
    while True:
        generator = torch.Generator().manual_seed(request.seed * 1_000_003 + step)
        yield {name: _draw(declared, request.sizes, generator) for name, declared in plan.inputs.items()}
        step += 1


def _draw(declared: Input, sizes: Mapping[str, int], generator: torch.Generator) -> Tensor:
    shape = shape_of(declared, sizes)
    if declared.dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(declared.dtype)
    if declared.dtype == torch.bool:
        return torch.ones(shape, dtype=torch.bool)
    return torch.randint(declared.low, declared.high, shape, generator=generator, dtype=declared.dtype)


def open_source(name: str | None, request: DataRequest, plan: PlanInfo) -> Iterator[Batch]:
    """The batches of ``module:function``, or synthetic ones. Raises ``BatchError`` if there is no such function."""
    if name is None:
        return synthetic(request, plan)
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise BatchError(f"data source {name!r} is not of the form module:function, as in my_data:batches")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise BatchError(f"data source {name!r}: there is no module {error.name!r}; add its folder to PYTHONPATH") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise BatchError(f"data source {name!r}: module {module_name!r} has no function {function_name!r}")
    batches = function(request)
    if not isinstance(batches, Iterable):
        raise BatchError(f"data source {name!r} returned {type(batches).__name__}, expected an iterable of batches")
    return iter(batches)

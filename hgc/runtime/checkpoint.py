"""Checkpoints with torch.distributed.checkpoint, laid out by the user's tensors and not by the plan.

Each rank writes the boxes it holds; a rank that loads asks for the boxes it needs. A strided shard or a padded parameter is a few more
boxes, so no tensor is gathered or rearranged, and any tool that reads DCP finds whole tensors under the user's names.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_pieces
from torch.distributed.checkpoint.state_dict_saver import save as save_pieces

from hgc.errors import ArtifactError
from hgc.ir.ops.random import get_state, set_state
from hgc.runtime.mesh import Mesh
from hgc.runtime.shards import Box
from hgc.runtime.state import Entry, plain

FORMAT = 1
INFO = "hgc.json"
MODEL = "model."
OPTIMIZER = "optimizer."
RANDOM = "random"
# how an optimizer computes, not what: chosen anew for the device at hand
IMPLEMENTATION_OPTIONS = ("foreach", "fused", "capturable", "differentiable")


@dataclass(frozen=True)
class Piece:
    """This rank's share of one stored tensor: the share, the whole shape, and the boxes it consists of."""

    local: Tensor
    shape: tuple[int, ...]
    held: tuple[Box, ...]

    def at(self, offset: Iterable[int]) -> Tensor:
        """The box that starts at ``offset`` of the whole tensor, as a view."""
        start = tuple(offset)
        return next(box for box in self.held if box.start == start).of_local(self.local)

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in self.held]


@dataclass(frozen=True)
class Stored:
    """A parameter or buffer that checkpoints hold, and this rank's share of it."""

    entry: Entry
    local: Tensor


class _SavePlanner(DefaultSavePlanner):
    """Writes boxes; duplicates (replicas) are left to one rank by the default global plan."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([item for name, piece in self.pieces.items() for item in _write_items(name, piece)])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces[index.fqn].at(index.offset)


def _write_items(name: str, piece: Piece) -> list[WriteItem]:
    properties, shape = TensorProperties(dtype=piece.local.dtype), torch.Size(piece.shape)
    return [
        WriteItem(MetadataIndex(name, chunk.offsets), WriteItemType.SHARD, tensor_data=TensorWriteData(chunk, properties, shape))
        for chunk in piece.chunks()
    ]


class _LoadPlanner(DefaultLoadPlanner):
    """Reads, for each box of this rank, whatever stored boxes overlap it."""

    def __init__(self, pieces: Mapping[str, Piece]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        requests = []
        for name, piece in self.pieces.items():
            found = stored[name]
            assert isinstance(found, TensorStorageMetadata)
            requests += create_read_items_for_chunk_list(name, found, piece.chunks())
        return LoadPlan(requests)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.pieces[index.fqn].at(index.offset)


# -- what is stored -------------------------------------------------------------------------------------------------------------------


def _model_pieces(stored: Iterable[Stored]) -> dict[str, Piece]:
    return {MODEL + found.entry.name: Piece(found.local, found.entry.layout.shape, found.entry.held) for found in stored}


def _replicated(tensor: Tensor) -> Piece:
    whole = tuple(tensor.shape)
    return Piece(tensor, whole, (Box((0,) * len(whole), (0,) * len(whole), whole),))


def _optimizer_pieces(
    entries: Iterable[Entry], parameters: Mapping[str, nn.Parameter], optimizer: torch.optim.Optimizer, scalars: dict[str, Any]
) -> dict[str, Piece]:
    """State that is shaped like a parameter is stored in its boxes, 0-d state whole, plain numbers go to ``scalars``."""
    found: dict[str, Piece] = {}
    for entry in entries:
        parameter = parameters.get(entry.name)
        for key, value in (optimizer.state.get(parameter, {}) if parameter is not None else {}).items():
            name = f"{OPTIMIZER}{entry.name}.{key}"
            if not isinstance(value, Tensor):
                scalars[name] = value
            elif value.dim() == 0:
                found[name] = _replicated(value)
            elif parameter is not None and value.shape == parameter.shape:
                found[name] = Piece(plain(value), entry.layout.shape, entry.held)
            else:
                raise ArtifactError(
                    f"optimizer state {key!r} of {entry.name!r} has shape {tuple(value.shape)}, neither that of its parameter nor 0-d, "
                    f"so it cannot be stored for other plans; use an elementwise optimizer such as AdamW"
                )
    return found


def _group_options(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> list[dict[str, Any]]:
    """Hyperparameters of each group, with the names of its parameters."""
    groups = []
    for group in optimizer.param_groups:
        kept = {key: value for key, value in group.items() if key not in ("params", *IMPLEMENTATION_OPTIONS)}
        options = {key: value.item() if isinstance(value, Tensor) else value for key, value in kept.items()}
        groups.append({"options": options, "parameters": [names[parameter] for parameter in group["params"]]})
    return groups


def _of_all_ranks(groups: list[dict[str, Any]], scalars: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The groups with all ranks' parameters, and all ranks' numbers."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (groups, scalars))
    parameters = [sorted({name for theirs, _ in found for name in theirs[index]["parameters"]}) for index in range(len(groups))]
    merged = [{**group, "parameters": names} for group, names in zip(groups, parameters, strict=True)]
    return merged, {name: number for _, theirs in found for name, number in theirs.items()}


# -- save and load --------------------------------------------------------------------------------------------------------------------


def check_target(path: Path) -> None:
    """Raise ``ArtifactError`` if a checkpoint cannot be written at ``path``, or would replace something that is none."""
    if path.exists() and not (path / INFO).is_file() and not (path.is_dir() and not any(path.iterdir())):
        raise ArtifactError(f"{path} exists and is no checkpoint of hgc, so it will not be replaced; give another folder")
    parent = next(folder for folder in path.absolute().parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ArtifactError(f"no checkpoint can be written to {path}, because {parent} is no folder that one may write to; give another")


def save(
    path: Path,
    stored: list[Stored],
    parameters: Mapping[str, nn.Parameter],
    mesh: Mesh,
    optimizer: torch.optim.Optimizer | None,
    step: int,
    names: Mapping[nn.Parameter, str] | None = None,
) -> None:
    """Write a checkpoint folder at ``path``, which holds the old one or the new one at any moment, never half of it.

    ``names``: of all the optimizer's parameters, where ranks have different ones; then what a rank lacks is another's to write.
    """
    check_target(path)
    entries = [found.entry for found in stored]
    pieces, scalars = _model_pieces(stored), dict[str, Any]()
    pieces[RANDOM] = _replicated(get_state())
    groups = None
    if optimizer is not None:
        pieces |= _optimizer_pieces(entries, parameters, optimizer, scalars)
        groups = _group_options(optimizer, names or {parameter: name for name, parameter in parameters.items()})
        if names is not None:
            groups, scalars = _of_all_ranks(groups, scalars)
    partial = path.with_name(f".{path.name}.partial")
    if mesh.rank == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
    dist.barrier()
    save_pieces({}, storage_writer=FileSystemWriter(partial), planner=_SavePlanner(pieces))
    if mesh.rank == 0:
        info = {"format": FORMAT, "step": step, "optimizer": groups, "scalars": scalars}
        (partial / INFO).write_text(json.dumps(info, indent=1))
        _replace_folder(partial, path)
    dist.barrier()


def _replace_folder(new: Path, path: Path) -> None:
    """Rename ``new`` to ``path``; a folder that is there already is moved aside first and removed last."""
    old = path.with_name(f".{path.name}.old")
    if old.exists():
        if path.exists():
            shutil.rmtree(old)
        else:
            os.rename(old, path)  # an earlier save was interrupted between its two renames
    if path.exists():
        os.rename(path, old)
    os.rename(new, path)
    shutil.rmtree(old, ignore_errors=True)


def load(
    path: Path,
    stored: list[Stored],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    names: Mapping[nn.Parameter, str] | None = None,
    elsewhere: Iterable[str] = (),
) -> int:
    """Read a checkpoint folder into the model (and the optimizer) and return its step. Raises ``ArtifactError`` if it does not fit.

    ``names`` as for :func:`save`; ``elsewhere``: what of the model other ranks have.
    """
    info, path = _read_info(path)
    reader = FileSystemReader(path)
    metadata = _read_metadata(reader, path)
    pieces = _model_pieces(stored)
    _check_model(pieces, metadata, {MODEL + name for name in elsewhere}, path)
    random_state = get_state()
    pieces[RANDOM] = _replicated(random_state)
    if optimizer is not None:
        _restore_groups(optimizer, info, names or {parameter: name for name, parameter in parameters.items()}, path)
        pieces |= _prepared_state([found.entry for found in stored], parameters, optimizer, metadata, info["scalars"])
    try:
        load_pieces({}, storage_reader=reader, planner=_LoadPlanner(pieces))
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ArtifactError(f"checkpoint {path} cannot be read ({reason}); use another checkpoint") from None
    set_state(random_state)
    return int(info["step"])


def _read_info(path: Path) -> tuple[dict[str, Any], Path]:
    old = path.with_name(f".{path.name}.old")
    if not path.exists() and old.exists():
        path = old  # a save was interrupted between its two renames
    if not (path / INFO).is_file():
        raise ArtifactError(f"{path} is no checkpoint of hgc ({INFO} is missing); give the folder that --save wrote")
    try:
        info = json.loads((path / INFO).read_text())
    except ValueError:
        raise ArtifactError(f"{path / INFO} is damaged; use another checkpoint") from None
    if info.get("format") != FORMAT:
        raise ArtifactError(f"checkpoint {path} has format {info.get('format')!r}, not {FORMAT}; read it with the hgc that wrote it")
    return info, path


def _read_metadata(reader: FileSystemReader, path: Path) -> dict[str, Any]:
    try:
        return dict(reader.read_metadata().state_dict_metadata)
    except Exception:  # unpickling a damaged file raises anything
        raise ArtifactError(f"the metadata of checkpoint {path} is missing or damaged; use another checkpoint") from None


def _check_model(pieces: Mapping[str, Piece], stored: Mapping[str, Any], elsewhere: set[str], path: Path) -> None:
    known = {name for name in stored if name.startswith(MODEL)}
    for name in sorted((pieces.keys() | elsewhere) ^ known):
        what = "holds, beyond what the program knows," if name in known else "lacks"
        raise ArtifactError(f"checkpoint {path} {what} {name.removeprefix(MODEL)!r}; it belongs to another model")
    for name, piece in pieces.items():
        shape = tuple(stored[name].size)
        if shape != piece.shape:
            raise ArtifactError(
                f"checkpoint {path} holds {name.removeprefix(MODEL)!r} with shape {shape}, the program with {piece.shape}; "
                f"it belongs to another model"
            )


def _restore_groups(optimizer: torch.optim.Optimizer, info: Mapping[str, Any], names: Mapping[nn.Parameter, str], path: Path) -> None:
    """Hyperparameters, group by group; groups must hold the same parameters as when they were saved."""
    groups = info["optimizer"]
    if groups is None:
        raise ArtifactError(f"checkpoint {path} holds no optimizer state; load it without an optimizer")
    own = set(names.values())
    now = [{names[parameter] for parameter in group["params"]} for group in optimizer.param_groups]
    if now != [own.intersection(group["parameters"]) for group in groups]:
        raise ArtifactError(f"the optimizer's parameter groups are not those in checkpoint {path}; build it as in the run that was saved")
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved["options"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) else value


def _prepared_state(
    entries: Iterable[Entry],
    parameters: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    stored: Mapping[str, Any],
    scalars: Mapping[str, Any],
) -> dict[str, Piece]:
    """Give the optimizer empty state for all that is stored, so that no step has to be taken first."""
    group_of = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    by_name = {entry.name: entry for entry in entries if entry.name in parameters}
    pieces: dict[str, Piece] = {}
    optimizer.state.clear()
    for stored_name in [*stored, *scalars]:
        name, _, key = stored_name.removeprefix(OPTIMIZER).rpartition(".")
        if not stored_name.startswith(OPTIMIZER) or name not in by_name or parameters[name] not in group_of:
            continue
        entry, parameter = by_name[name], parameters[name]
        if stored_name in scalars:
            optimizer.state[parameter][key] = scalars[stored_name]
            continue
        shape, dtype = tuple(stored[stored_name].size), stored[stored_name].properties.dtype
        if shape == () != entry.layout.shape:
            options = group_of[parameter]
            on_device = options.get("fused") or options.get("capturable")  # where torch keeps its step counters
            value = torch.zeros((), dtype=dtype, device=parameter.device if on_device else "cpu")
            pieces[stored_name] = _replicated(value)
        else:
            # as the optimizer would make it: a plan of another precision may have written it
            own = parameter.dtype if dtype.is_floating_point else dtype
            value = torch.zeros_like(parameter, dtype=own, requires_grad=False)
            pieces[stored_name] = Piece(value, entry.layout.shape, entry.held)
        optimizer.state[parameter][key] = value
    return pieces

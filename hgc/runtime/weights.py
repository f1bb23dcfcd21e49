"""Whole weights in files of other tools: safetensors and ``torch.save``, under the user's names."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hgc.errors import ArtifactError

INDEX = "model.safetensors.index.json"


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors by name from a ``.safetensors`` file, a folder of them as Hugging Face writes it, or a state dict of ``torch.save``."""
    if path.is_dir():
        files = _parts(path)
    elif path.is_file():
        files = [path]
    else:
        raise ArtifactError(f"--weights {path}: there is no such file; give a .safetensors file, a folder of them or one of torch.save")
    if files[0].suffix == ".safetensors":
        return {name: tensor for file in files for name, tensor in _read_safetensors(file).items()}
    return _read_torch(path)


def _parts(folder: Path) -> list[Path]:
    """The files of a model that Hugging Face has saved, in one or several parts."""
    if (folder / INDEX).is_file():
        names = set(json.loads((folder / INDEX).read_text())["weight_map"].values())
        return [folder / name for name in sorted(names)]
    if not (folder / "model.safetensors").is_file():
        raise ArtifactError(f"--weights {folder} holds no model.safetensors and no {INDEX}; give the file itself")
    return [folder / "model.safetensors"]


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    except ModuleNotFoundError:
        raise ArtifactError(f"--weights {path} needs the package safetensors; pip install safetensors") from None
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"--weights {path} is no safetensors file ({error}); save the model again") from None


def _read_torch(path: Path) -> dict[str, Tensor]:
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # a file that is no archive fails in many ways
        raise ArtifactError(f"--weights {path} is no file of torch.save that holds tensors only; save a state_dict") from None
    if not isinstance(loaded, dict):
        raise ArtifactError(f"--weights {path} holds {type(loaded).__name__}, expected a state dict")
    return loaded


def check_export(path: Path) -> None:
    """Raise ``ArtifactError`` if weights cannot be exported to ``path``."""
    if path.suffix != ".safetensors":
        raise ArtifactError(f"weights are exported as safetensors, but {path} has another ending; name it for example model.safetensors")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ArtifactError(f"{path} cannot be written: it is a folder or its folder is missing; give a file in a folder that exists")
    try:
        import safetensors.torch  # noqa: F401
    except ModuleNotFoundError:
        raise ArtifactError(f"writing {path} needs the package safetensors; pip install safetensors") from None


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file as Hugging Face's own are, whole or not at all."""
    from safetensors.torch import save_file

    partial = path.with_name(f".{path.name}.partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata={"format": "pt"})
    os.replace(partial, path)

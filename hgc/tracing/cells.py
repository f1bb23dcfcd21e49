"""Which modules of a model are its blocks: found by structure, before tracing, without any list of known names."""

from __future__ import annotations

import types
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hgc._torch_compat import forward_hooks

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_SCALARS = (bool, int, float, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass(frozen=True)
class Cell:
    """A module that may become a block.

    ``container`` is the path of the module that holds it and its siblings; ``listed`` tells a member of a ``ModuleList``
    (``Sequential``, ``ModuleDict``) from an attribute; ``structure`` is equal for modules with the same classes and parameters.
    """

    path: str
    module: nn.Module
    container: str
    listed: bool
    structure: str
    siblings: int

    @property
    def kind(self) -> str:
        return type(self.module).__name__


def find_cells(model: nn.Module, opened: frozenset[str] = frozenset()) -> list[Cell]:
    """Blocks by structure; never one inside another.

    The members of a list of modules are blocks if some of them are alike. A list of unlike members, or plain attributes that
    are alike (two towers), are blocks only if nothing inside them repeats. Containers in ``opened`` turned out to hold no chain:
    look inside their members.
    """
    return _Finder(opened).inside(model, "")


class _Finder:
    def __init__(self, opened: frozenset[str]) -> None:
        self.opened = opened
        self._structures: dict[int, str] = {}

    def inside(self, module: nn.Module, path: str) -> list[Cell]:
        children = [(_join(path, name), child) for name, child in module.named_children() if _has_parameters(child)]
        listed = isinstance(module, _LISTS)
        alike = Counter(self.structure(child) for _, child in children if not _is_leaf(child))
        cells = [
            Cell(child_path, child, path, listed, self.structure(child), alike[self.structure(child)])
            for child_path, child in children
            if not _is_leaf(child) and (listed or alike[self.structure(child)] > 1)
        ]
        repeated = any(cell.siblings > 1 for cell in cells)
        if listed and repeated and path not in self.opened:
            return cells
        nested = {inner: self.inside(child, inner) for inner, child in children if not _computes_parameter(child)}
        if path in self.opened:
            return [cell for found in nested.values() for cell in found]
        if listed and not any(cell.siblings > 1 for found in nested.values() for cell in found):
            return cells
        result = []
        own = {cell.path: cell for cell in cells}
        for child_path, found in nested.items():
            if child_path in own and not found:
                result.append(own[child_path])
            else:
                result += found
        return result

    def structure(self, module: nn.Module) -> str:
        """Classes, names, shapes and types of everything inside."""
        if id(module) not in self._structures:
            own = [type(module).__qualname__]
            own += [f"{name}:{tuple(p.shape)}:{p.dtype}:{p.requires_grad}" for name, p in module.named_parameters(recurse=False)]
            own += [f"{name}:{tuple(b.shape)}:{b.dtype}" for name, b in module.named_buffers(recurse=False)]
            own += [f"{name}=({self.structure(child)})" for name, child in module.named_children()]
            self._structures[id(module)] = ";".join(own)
        return self._structures[id(module)]


@dataclass(frozen=True)
class FoldGroup:
    """Cells whose bodies must be equal if they are called alike; ``index_names`` are attributes that number them (``layer_idx``)."""

    key: str
    cells: tuple[Cell, ...]
    index_names: frozenset[tuple[str, str]]


def fold_groups(cells: list[Cell]) -> list[FoldGroup]:
    """Group cells of one list by structure and by all plain attributes inside them, but for integers that number the instances."""
    by_structure: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        by_structure[cell.container, cell.structure].append(cell)
    groups: list[FoldGroup] = []
    for (container, _), alike in by_structure.items():
        attributes = [_attributes(cell.module) for cell in alike]
        numbering = frozenset(key for key in attributes[0] if _numbers_instances([found.get(key) for found in attributes]))
        by_attributes: dict[str, list[Cell]] = defaultdict(list)
        for cell, found in zip(alike, attributes, strict=True):
            by_attributes[repr(sorted((k, _identity(v)) for k, v in found.items() if k not in numbering))].append(cell)
        for number, members in enumerate(by_attributes.values()):
            groups.append(FoldGroup(f"{container}/{members[0].kind}/{len(groups)}.{number}", tuple(members), numbering))
    return groups


def _attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Everything that a forward could read besides tensors and submodules: (relative path, name) -> value."""
    found: dict[tuple[str, str], Any] = {}
    for path, inner in module.named_modules():
        for name, value in vars(inner).items():
            if not name.startswith("_") or not isinstance(value, dict | set):
                found[path, name] = value
        for hook in forward_hooks(inner):
            found[path, f"hook {id(hook)}"] = hook
    return found


def _numbers_instances(values: list[Any]) -> bool:
    return len(values) > 1 and all(type(v) is int for v in values) and len(set(values)) == len(values)


def _identity(value: Any) -> str:
    if isinstance(value, _SCALARS):
        return repr(value)
    if isinstance(value, tuple | list):
        return "[" + ",".join(map(_identity, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key!r}:{_identity(x)}" for key, x in value.items()) + "}"
    if isinstance(value, types.MethodType):
        return f"{value.__func__.__qualname__} of {type(value.__self__).__qualname__}"
    return str(id(value))


def _is_leaf(module: nn.Module) -> bool:
    """A module of torch itself that has no parts, such as ``Linear``, or one that computes a parameter."""
    from_torch = type(module).__module__.startswith("torch.nn.")
    return _computes_parameter(module) or (from_torch and next(module.children(), None) is None)


def _computes_parameter(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.utils.")


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

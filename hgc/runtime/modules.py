"""The classes that an emitted program is made of: blocks that declare their state, and the model that calls them."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hgc.errors import ArtifactError, PlanError
from hgc.runtime.plan_info import Normal, sharded_axes
from hgc.runtime.shards import Layout, Split


@dataclass(frozen=True)
class Declaration:
    """One parameter or buffer as the program declares it; ``sync`` is ``None`` for the plan's data axes."""

    name: str
    kind: str  # "parameter" | "buffer"
    dtype: torch.dtype
    layout: Layout
    requires_grad: bool = False
    persistent: bool = True
    init: float | Normal | None = None
    sync: tuple[str, ...] | None = None


class Container(nn.Module):
    """A module that only holds state. ``container["name"]`` and ``container[0]`` reach what is no Python identifier."""

    def __getitem__(self, key: str | int) -> Any:
        name = str(key)
        for found in (self._modules, self._parameters, self._buffers):
            if name in found:
                return found[name]
        raise KeyError(name)


class Block(Container):
    """One block of the program; a subclass declares its state in ``__init__`` and computes in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self._hgc_path = ""
        self._hgc_declared: dict[str, Declaration] = {}

    def parameter(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        requires_grad: bool = True,
        pad_to: Sequence[int] | None = None,
        init: float | Normal | None = None,
        sync: tuple[str, ...] | None = None,
        **placements: str,
    ) -> None:
        """Declare a parameter by its name inside the block (or its full name behind a dot) and its shape in the user's model.

        ``placements`` gives the axes where it is sharded, in mesh order (``tp="S(0)"``); ``pad_to`` the padded shape that is sharded;
        ``sync`` the axes over which its gradient is summed (default: the plan's data axes that do not shard it).
        """
        layout = _layout(name, shape, pad_to, placements)
        declared = Declaration(name, "parameter", dtype, layout, requires_grad=requires_grad, init=init, sync=sync)
        self._declare(declared)

    def buffer(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype = torch.float32,
        *,
        persistent: bool = True,
        init: float | Normal | None = None,
        **placements: str,
    ) -> None:
        """Declare a buffer or constant; one that is not persistent gets its values from the program's constants."""
        self._declare(Declaration(name, "buffer", dtype, _layout(name, shape, None, placements), persistent=persistent, init=init))

    def _declare(self, declared: Declaration) -> None:
        if declared.name in self._hgc_declared:
            raise PlanError(f"block {type(self).__name__} declares {declared.name!r} twice; give each tensor one declaration")
        self._hgc_declared[declared.name] = declared
        holder, leaf = self.holder(declared.name)
        empty = torch.empty(declared.layout.shape, dtype=declared.dtype, device="meta")
        # register_parameter refuses names that are attributes of modules, such as "type"
        if declared.kind == "parameter":
            holder._parameters[leaf] = nn.Parameter(empty, requires_grad=declared.requires_grad)
        else:
            holder._buffers[leaf] = empty
            if not declared.persistent:
                holder._non_persistent_buffers_set.add(leaf)

    def full_name(self, declared: Declaration) -> str:
        """The name in the user's model: the block's place and the declared name, which is full already if it starts with a dot."""
        if declared.name.startswith("."):
            return declared.name[1:]
        return f"{self._hgc_path}.{declared.name}" if self._hgc_path else declared.name

    def holder(self, name: str) -> tuple[nn.Module, str]:
        """The module that holds a declared tensor, and the tensor's name there."""
        holder: nn.Module = self
        *path, leaf = name.removeprefix(".").split(".")
        for part in path:
            if part not in holder._modules:
                holder._modules[part] = Container()
            found = holder._modules[part]
            assert found is not None
            holder = found
        return holder, leaf


class Blocks(nn.ModuleList):
    """Blocks that repeat along the model, in order; under ``zero=3`` each is a unit of its own."""


def block(path: str, cls: type[Block]) -> Block:
    """A block that stood at ``path`` in the user's model."""
    made = cls()
    made._hgc_path = path
    return made


def blocks(path: str, classes: Sequence[type[Block]], first: int = 0) -> Blocks:
    """One block for each class; ``{}`` in ``path`` is the position, counted from ``first``, as in ``"model.layers.{}"``."""
    return Blocks([block(path.replace("{}", str(index)), cls) for index, cls in enumerate(classes, first)])


def stage(cls: Callable[..., Model], **arguments: int) -> Callable[[], Model]:
    """What makes a pipeline stage of a class that several stages share."""
    return partial(cls, **arguments)


class Model(nn.Module):
    """The whole program. Its state carries the names of the user's model, whatever the blocks are called here."""

    def __init__(self) -> None:
        super().__init__()
        self._hgc_tied: dict[str, str] = {}

    def tie(self, tied: Mapping[str, str]) -> None:
        """Let each further name stand for the tensor that is declared under the name it maps to."""
        self._hgc_tied = dict(tied)

    def declarations(self) -> dict[str, tuple[Declaration, tuple[tuple[nn.Module, str], ...]]]:
        """Original name -> declaration, and every place that holds the tensor. Raises ``PlanError`` if two declarations disagree."""
        found: dict[str, tuple[Declaration, tuple[tuple[nn.Module, str], ...]]] = {}
        for module in self.modules():
            if not isinstance(module, Block):
                continue
            for declared in module._hgc_declared.values():
                full = module.full_name(declared)
                name = self._hgc_tied.get(full, full)
                place = module.holder(declared.name)
                declared = replace(declared, name=name)
                known, places = found.get(name, (declared, ()))
                if (known.kind, known.dtype, known.layout) != (declared.kind, declared.dtype, declared.layout):
                    raise PlanError(f"{name!r} is declared in two ways: {known} and {declared}; tied tensors need equal declarations")
                found[name] = known, (*places, place)
        return found

    def aliases(self) -> dict[str, str]:
        """Further name -> declared name."""
        return dict(self._hgc_tied)

    def _named(self, kind: str, persistent_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, (declared, places) in self.declarations().items():
            if declared.kind == kind and (declared.persistent or not persistent_only):
                holder, leaf = places[0]
                tensor = (holder._parameters if kind == "parameter" else holder._buffers)[leaf]
                assert tensor is not None
                yield name, tensor

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under the names of the user's model; with ``remove_duplicate=False`` tied names too."""
        if recurse:
            yield from self._with_aliases(dict(self._named("parameter")), prefix, remove_duplicate)  # type: ignore[misc]

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """This rank's buffers under the names of the user's model."""
        if recurse:
            yield from self._with_aliases(dict(self._named("buffer")), prefix, remove_duplicate)

    def _with_aliases(self, named: dict[str, Tensor], prefix: str, remove_duplicate: bool) -> Iterator[tuple[str, Tensor]]:
        dot = f"{prefix}." if prefix else ""
        for name, tensor in named.items():
            yield dot + name, tensor
        for alias, name in self._hgc_tied.items():
            if not remove_duplicate and name in named:
                yield dot + alias, named[name]

    def state_dict(self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False) -> Any:
        """This rank's parameters and persistent buffers under the names of the user's model, tied names too."""
        named = {**dict(self._named("parameter")), **dict(self._named("buffer", persistent_only=True))}
        found = {name: tensor if keep_vars else tensor.detach() for name, tensor in self._with_aliases(named, prefix, False)}
        if destination is None:
            return found
        destination.update(found)
        return destination

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy this rank's tensors in (as ``state_dict`` gives them; whole tensors go through ``Trainer.load_state_dict``)."""
        own = self.state_dict()
        missing, unexpected = [n for n in own if n not in state_dict], [n for n in state_dict if n not in own]
        if strict and (missing or unexpected):
            raise ArtifactError(f"the state does not fit the model: missing {missing[:3]}, unknown {unexpected[:3]}; load the same model")
        with torch.no_grad():
            for name in own.keys() & state_dict.keys():
                own[name].copy_(state_dict[name])
        return None


def _layout(name: str, shape: Sequence[int], pad_to: Sequence[int] | None, placements: Mapping[str, str]) -> Layout:
    splits = []
    for axis, shard in sharded_axes(placements):
        if shard.dim >= len(shape) or not isinstance(shard.parts, int | tuple):
            raise PlanError(f"{name!r} of shape {tuple(shape)} cannot be {shard} on {axis!r}; shard one of its dims in parts of known size")
        splits.append(Split((axis,), shard.dim, shard.parts))
    padded = tuple(shape) if pad_to is None else tuple(pad_to)
    if len(padded) != len(shape) or any(p < s for p, s in zip(padded, shape, strict=True)):
        raise PlanError(f"{name!r} of shape {tuple(shape)} cannot be padded to {padded}; no size may shrink")
    return Layout(tuple(shape), padded, tuple(splits))


_RESERVED = frozenset(dir(Block())) | frozenset(dir(FSDPModule))


def access(name: str) -> str:
    """Python source that reaches a declared tensor from its block: ``"mlp.0.weight"`` -> ``".mlp[0].weight"``.

    Safe for any name: what is no plain identifier, a keyword, mangled in classes, or taken by ``nn.Module`` is indexed by its ``repr``.
    """
    return "".join(_access(part) for part in name.split("."))


def _access(part: str) -> str:
    if part.isascii() and part.isidentifier() and not keyword.iskeyword(part) and not part.startswith("_") and part not in _RESERVED:
        return f".{part}"
    if part.isascii() and part.isdigit() and str(int(part)) == part:
        return f"[{part}]"
    return f"[{part!r}]"

"""Mark the calls of blocks in the captured graph, and trace equal blocks only twice.

``forward`` of each candidate is wrapped, on the copy only. A traced call stands between ``hgc::enter`` and ``hgc::exit``; once
two calls of a group were traced, further calls with the same kind of arguments become one ``hgc::call`` node each. That is sound
if the two traced bodies are equal, if nothing leaves a body but its outputs, and if no forward reads the number that tells it from
its siblings; all three are checked, and :class:`StartOver` starts over without the shortcut if one fails.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hgc._torch_compat import flatten_tree, unflatten_tree
from hgc.tracing.cells import Cell, FoldGroup, find_cells, fold_groups
from hgc.tracing.shortcuts import Shortcuts

_TRACED = 2


@dataclass
class CallRecord:
    """One call of a cell: names of its tensor arguments, and whether it was traced."""

    cell: Cell
    group: str
    arguments: list[str]
    traced: bool


@dataclass
class _Template:
    """What a call with a certain kind of arguments returns, known from the first traced one."""

    traced: int = 0
    spec: Any = None
    outputs: list[Any] = field(default_factory=list)


class Marking:
    """The wrapped forwards of one attempt and what they recorded; region ``i`` of the graph is ``calls[i]``."""

    def __init__(self, model: nn.Module, shortcuts: Shortcuts) -> None:
        self.shortcuts = shortcuts
        self.calls: list[CallRecord] = []
        self.classes = {path: type(module).__name__ for path, module in model.named_modules()}
        self.read_index: set[str] = set()
        self._templates: dict[tuple[str, str], _Template] = {}
        for group in fold_groups(find_cells(model, shortcuts.opened)):
            for number, cell in enumerate(group.cells):
                if number < _TRACED and shortcuts.fold:
                    self._watch_numbers(group, cell)
                self._wrap(group, cell)

    def _wrap(self, group: FoldGroup, cell: Cell) -> None:
        original: Callable[..., Any] = cell.module.forward
        signature = inspect.signature(original)

        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._call(group.key, cell, original, signature, args, kwargs)

        vars(cell.module)["forward"] = forward

    def _call(
        self,
        group: str,
        cell: Cell,
        original: Callable[..., Any],
        signature: inspect.Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        leaves, spec = flatten_tree((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        region = len(self.calls)
        record = CallRecord(cell, group, _argument_names(signature, args, kwargs), True)
        self.calls.append(record)
        template = self._templates.setdefault((group, _kind_of_call(leaves, spec)), _Template())
        if self.shortcuts.fold and group not in self.shortcuts.whole and template.traced >= _TRACED and _is_simple(template):
            record.traced = False
            like = [x for x in template.outputs if isinstance(x, Tensor)]
            return _restore(template.outputs, template.spec, torch.ops.hgc.call(region, tensors, like))
        inside = iter(torch.ops.hgc.enter(region, tensors))
        leaves = [next(inside) if isinstance(x, Tensor) else x for x in leaves]
        args, kwargs = unflatten_tree(leaves, spec)
        outputs, output_spec = flatten_tree(original(*args, **kwargs))
        marked = torch.ops.hgc.exit(region, [x for x in outputs if isinstance(x, Tensor)])
        if not template.traced:
            tensors = iter(marked)
            template.spec, template.outputs = output_spec, [next(tensors) if isinstance(x, Tensor) else x for x in outputs]
        template.traced += 1
        return _restore(outputs, output_spec, marked)

    def _watch_numbers(self, group: FoldGroup, cell: Cell) -> None:
        """Record when a forward reads the attribute that numbers its module: such modules may differ although they look alike."""
        for path, inner in cell.module.named_modules():
            names = [name for where, name in group.index_names if where == path]
            if names:
                inner.__class__ = _watched(type(inner), names, lambda: self.read_index.add(group.key))


def _watched(base: type[nn.Module], names: list[str], on_read: Callable[[], None]) -> type[nn.Module]:
    def make(name: str) -> property:
        def read(module: nn.Module) -> Any:
            on_read()
            return vars(module)[name]

        def write(module: nn.Module, value: Any) -> None:
            vars(module)[name] = value

        return property(read, write)

    members: dict[str, Any] = {name: make(name) for name in names}
    members["__module__"], members["__qualname__"] = base.__module__, base.__qualname__
    return type(base.__name__, (base,), members)


def _restore(outputs: list[Any], spec: Any, tensors: list[Tensor]) -> Any:
    new = iter(tensors)
    return unflatten_tree([next(new) if isinstance(x, Tensor) else x for x in outputs], spec)


def _kind_of_call(leaves: list[Any], spec: Any) -> str:
    described = [f"{[str(size) for size in x.shape]}{x.dtype}" if isinstance(x, Tensor) else repr(x) for x in leaves]
    return f"{spec}|{described}"


def _is_simple(template: _Template) -> bool:
    return all(isinstance(x, Tensor | bool | int | float | str | None) for x in template.outputs)


def _argument_names(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The parameter that each tensor among the flattened arguments belongs to."""
    positional = [p.name for p in signature.parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    named = [*zip([*positional, *["x"] * len(args)], args, strict=False), *kwargs.items()]
    return [name for name, value in named for leaf in flatten_tree(value)[0] if isinstance(leaf, Tensor)]

"""One operator call as the printer sees it: arguments by name, without those that equal their defaults."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from hgc.backends.torchrun.expressions import Expression, literal, sequence


@dataclass(frozen=True)
class Parameter:
    """A parameter of an operator. ``length`` is the fixed length of an integer list (an integer may stand for a list of one)."""

    name: str
    has_default: bool
    default: Any
    keyword_only: bool
    length: int | None = None


@cache
def parameters(target: Any) -> tuple[Parameter, ...]:
    """Parameters of an ATen overload or of a Python function."""
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return tuple(
            Parameter(a.name, a.has_default_value(), a.default_value if a.has_default_value() else None, a.kwarg_only, a.N)
            for a in schema.arguments
        )
    given = inspect.signature(target).parameters.values()
    return tuple(Parameter(p.name, p.default is not p.empty, p.default, p.kind is p.KEYWORD_ONLY) for p in given)


@dataclass(frozen=True)
class Operation:
    """A node with the way to print its operands. ``device`` is source that names the device of this rank."""

    node: fx.Node
    operand: Callable[[fx.Node], Expression]
    device: str

    @property
    def target(self) -> Any:
        return self.node.target

    @property
    def arguments(self) -> dict[str, Any]:
        """All arguments by name, defaults filled in."""
        named = {p.name: p.default for p in parameters(self.target)}
        named.update(zip((p.name for p in parameters(self.target)), self.node.args, strict=False))
        named.update(self.node.kwargs)
        return named

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def is_default(self, name: str) -> bool:
        (parameter,) = (p for p in parameters(self.target) if p.name == name)
        return parameter.has_default and _same(self[name], parameter.default)

    def source(self, value: Any) -> Expression:
        """An argument: a value of the program, a list of arguments, or a constant."""
        if isinstance(value, fx.Node):
            return self.operand(value)
        if isinstance(value, list | tuple):
            return Expression(sequence((self.source(item).text for item in value), "()" if isinstance(value, tuple) else "[]"))
        if isinstance(value, torch.device):
            return Expression(self.device)
        return literal(value)

    def text(self, name: str) -> str:
        return self.source(self[name]).text

    def atom(self, name: str) -> str:
        """An argument on which a method can be called."""
        return self.source(self[name]).atom

    def rest(
        self, skip: int, *, ignore: frozenset[str] = frozenset(), lists_as: type[list[Any]] | type[tuple[Any, ...]] = tuple
    ) -> Iterator[str]:
        """Arguments after the first ``skip``: positional while nothing is left out, switches and what follows by keyword."""
        named, by_keyword = self.arguments, False
        for parameter in parameters(self.target)[skip:]:
            value = named[parameter.name]
            if parameter.name in ignore or (parameter.has_default and _same(value, parameter.default)):
                by_keyword = True
                continue
            if parameter.length == 1 and isinstance(value, list | tuple) and len(value) == 1:
                value = value[0]
            shown = self.source(lists_as(value) if isinstance(value, list) else value).text
            switch = value is None or isinstance(value, bool | torch.dtype | torch.layout | torch.memory_format)
            by_keyword = by_keyword or parameter.keyword_only or switch
            yield f"{parameter.name}={shown}" if by_keyword else shown


def _same(value: Any, default: Any) -> bool:
    """Equal to the default in type as well (``1`` and ``True`` and ``1.0`` are told apart); no node equals a constant."""
    if isinstance(value, list | tuple) and isinstance(default, list | tuple):
        return len(value) == len(default) and all(_same(a, b) for a, b in zip(value, default, strict=True))
    return type(value) is type(default) and bool(value == default)

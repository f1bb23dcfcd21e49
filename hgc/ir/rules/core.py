"""The operator rule table: which input placements give which output placement, one mesh axis at a time.

A rule is a function from a :class:`Call` to its :class:`Case` list. Rules speak about where *values* live (``Shard``, ``Partial``
or whole) and leave the two kinds of whole values to :func:`hgc.ir.derive.derive`, because the kind rule is the
same for every operator. The planner prices cases, the transform picks one, the verifier demands one: all read this table.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from typing import Any, TypeAlias

import sympy
import torch
from torch import fx

from hgc.ir.placement import Invariant, Partial, Placement, Shard
from hgc.ir.value import Info, Size, Value, info

WHOLE: Placement = Invariant()
"""In rules: the full value on every rank, of either kind."""
PARTIAL: Placement = Partial()
TO_THE_END = 2**62
"""Ends of slices from here on mean the end of the dim."""

Rewrite: TypeAlias = Callable[[fx.Node, str, int], fx.Node]
"""``rewrite(node, axis, size)`` turns a node into its sharded form and returns the node that now holds the value."""


@dataclass(frozen=True)
class Operand:
    """A tensor argument as seen by the axis being lowered: ``shape`` is what a rank holds after the earlier axes.

    ``found`` is where it lives now on that axis; rules look at it only to offer strided shards, which are too many to enumerate.
    """

    index: int
    shape: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool
    node: fx.Node
    found: Placement = WHOLE

    @property
    def rank(self) -> int:
        return len(self.shape)


@dataclass(frozen=True)
class Case:
    """One legal way to run an operator: a placement for each operand, and for each output.

    ``rewrite`` is set where the sharded operator is another one (a vocabulary-parallel lookup): such a case is an offer to the transform
    and never accepted by the verifier, which sees the rewritten operator. ``method`` names the way where an axis has to say which one
    it takes (attention along the sequence).
    """

    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    rewrite: Rewrite | None = None
    method: str = ""


@dataclass(frozen=True)
class Call:
    """An operator call with named arguments; tensors are replaced by :class:`Operand`, sizes by expressions."""

    target: Any
    arguments: Mapping[str, Any]
    operands: tuple[Operand, ...]
    outputs: tuple[tuple[Size, ...], ...]
    axis: str
    size: int
    hints: Mapping[sympy.Symbol, int]
    mesh: Mapping[str, int] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    @property
    def shape(self) -> tuple[Size, ...]:
        """Shape of the first output after the earlier axes."""
        return self.outputs[0]

    def number(self, size: Any) -> int:
        """A size as an integer, by the planning hints (every symbol a multiple of the mesh)."""
        if isinstance(size, int) or size.is_Integer:
            return int(size)
        return _evaluated(size, tuple(self.hints.items()))

    def divides(self, size: Any) -> bool:
        number = self.number(size)
        return number >= self.size and number % self.size == 0

    def is_before(self, other: str) -> bool:
        """Is this axis major to the other one, so that it splits a dim first?"""
        order = list(self.mesh)
        return order.index(self.axis) < order.index(other)

    def seeing(self, operand: Operand) -> Call:
        """The call with one operand replaced."""

        def exchanged(argument: Any) -> Any:
            if isinstance(argument, list):
                return [exchanged(item) for item in argument]
            return operand if isinstance(argument, Operand) and argument.index == operand.index else argument

        arguments = {name: exchanged(argument) for name, argument in self.arguments.items()}
        return replace(self, arguments=arguments, operands=tuple(map(exchanged, self.operands)))

    def ranks(self, axis: str | None) -> int:
        """How many ranks an axis has; 1 for None."""
        return 1 if axis is None else self.mesh[axis]

    def case(self, placed: Mapping[int, Placement], *outputs: Placement, rewrite: Rewrite | None = None, method: str = "") -> Case:
        """A case in which operands that are not named are whole."""
        inputs = tuple(placed.get(operand.index, WHOLE) for operand in self.operands)
        return Case(inputs, outputs * len(self.outputs) if len(outputs) == 1 else outputs, rewrite, method)

    def all_whole(self) -> Case:
        return self.case({}, WHOLE)


@lru_cache(maxsize=100_000)
def _evaluated(size: sympy.Expr, hints: tuple[tuple[sympy.Symbol, int], ...]) -> int:
    return int(size.subs(hints))


Rule: TypeAlias = Callable[[Call], Iterable[Case]]
_TABLE: dict[Any, Rule] = {}


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register a rule. ``hgc.ir.rules.rule`` is public: users add rules for their own operators in the same way."""

    def register(function: Rule) -> Rule:
        for target in targets:
            _TABLE[target] = function
        return function

    return register


def overloads(*names: str) -> list[Any]:
    """ATen overloads by name (``"reshape.default"``); a name that this torch lacks is left out."""
    found = []
    for name in names:
        packet, _, overload = name.partition(".")
        operator = getattr(torch.ops.aten, packet, None)
        if operator is not None and (overload or "default") in operator.overloads():
            found.append(getattr(operator, overload or "default"))
    return found


_RANDOM = frozenset(overloads("rrelu"))
"""Tagged as pointwise, but what it does to an element depends on a random number."""


def rule_for(target: Any) -> Rule | None:
    """The rule of an operator, or None: then it runs replicated, and the report says so."""
    found = _TABLE.get(target)
    if found is None and torch.Tag.pointwise in getattr(target, "tags", ()) and target not in _RANDOM:
        found = _TABLE["pointwise"]
    return found


def registered() -> Iterator[Any]:
    """Targets that have a rule of their own."""
    return (target for target in _TABLE if target != "pointwise")


def cases(call: Call) -> Iterator[Case]:
    """All legal cases of a call, the whole one first; one placement for an operand that is passed twice."""
    found = rule_for(call.target)
    yield from _consistent(call, found(call) if found is not None else [call.all_whole()])


def _consistent(call: Call, offered: Iterable[Case]) -> Iterator[Case]:
    for case in offered:
        by_node: dict[fx.Node, Placement] = {}
        if any(p == PARTIAL and o.dtype == torch.bool for o, p in zip(call.operands, case.inputs, strict=True)):
            continue  # truth values do not add up
        if all(by_node.setdefault(o.node, p) == p for o, p in zip(call.operands, case.inputs, strict=True)):
            yield case


@cache
def _parameters(target: Any) -> tuple[tuple[str, Any], ...]:
    schema = getattr(target, "_schema", None)
    if schema is not None:
        return tuple((a.name, a.default_value if a.has_default_value() else None) for a in schema.arguments)
    signature = inspect.signature(target)
    return tuple((p.name, None if p.default is p.empty else p.default) for p in signature.parameters.values())


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of a call by parameter name, defaults filled in."""
    names = _parameters(node.target)
    named = dict(names)
    named.update(zip((name for name, _ in names), node.args, strict=False))
    named.update(node.kwargs)
    return named


_UPDATED = {"aten::batch_norm": ("running_mean", "running_var"), "batch_norm": ("mean", "var")}
"""Operators that update tensor arguments in place without saying so in a schema."""


def updated_arguments(node: fx.Node) -> list[fx.Node]:
    """Tensors that a call changes in place: they must be the buffers themselves, never copies."""
    schema = getattr(node.target, "_schema", None)
    given = named_arguments(node)
    names = _UPDATED.get(schema.name if schema is not None else getattr(node.target, "__name__", ""), ())
    if schema is not None and schema.is_mutable:
        names = tuple(a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)
    return [given[name] for name in names if isinstance(given[name], fx.Node)]


def make_call(
    node: fx.Node,
    axis: str,
    mesh: Mapping[str, int],
    hints: Mapping[sympy.Symbol, int],
    found: Mapping[fx.Node, Placement] | None = None,
) -> Call:
    """The call as mesh axis ``axis`` sees it: shapes after the axes before it, placements ``found`` on the axis itself."""
    earlier = list(mesh).index(axis)
    operands: list[Operand] = []

    def seen(value: Value) -> tuple[Size, ...]:
        return Value(value.shape, value.dtype, placements=value.placements[:earlier]).local_shape(dict(mesh))

    def convert(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [convert(item) for item in argument]
        if not isinstance(argument, fx.Node):
            return argument
        known = info(argument)
        if known.size is not None:
            return known.size
        assert isinstance(known.value, Value), f"{node.name} takes {argument.name}, which is not one tensor"
        placement = (found or {}).get(argument, WHOLE)
        value = known.value
        operands.append(Operand(len(operands), seen(value), value.dtype, value.requires_grad, argument, placement))
        return operands[-1]

    arguments = {name: convert(argument) for name, argument in named_arguments(node).items()}
    result: Info = info(node)
    values = result.value if isinstance(result.value, tuple) else (result.value,)
    outputs = tuple(seen(value) for value in values if value is not None)
    return Call(node.target, arguments, tuple(operands), outputs, axis, mesh[axis], hints, mesh)


def shards(call: Call, operand: Operand) -> Iterator[int]:
    """Dims of an operand that the axis divides."""
    return (dim for dim in range(operand.rank) if call.divides(operand.shape[dim]))


def strided_inputs(call: Call) -> list[tuple[Operand, Shard]]:
    """Operands that carry a strided shard now."""
    return [(o, o.found) for o in call.operands if isinstance(o.found, Shard) and not o.found.is_plain]


def append_axis(name: str) -> Rewrite:
    """Rewrite that adds the axis to a tuple argument of the operator (``batch_axes``, ``random_axes``)."""

    def rewrite(node: fx.Node, axis: str, size: int) -> fx.Node:
        names = [n for n, _ in _parameters(node.target)]
        position = names.index(name)
        if position < len(node.args):
            present = node.args[position]
            assert isinstance(present, tuple)
            node.update_arg(position, (*present, axis))
        else:
            present = node.kwargs.get(name, ())
            assert isinstance(present, tuple)
            node.update_kwarg(name, (*present, axis))
        return node

    return rewrite

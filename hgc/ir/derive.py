"""From input placements to output placements: the one function that says what is true on a mesh axis.

The transform calls it on what it built, the verifier on what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hgc.errors import ShardingError
from hgc.ir.placement import Invariant, Placement, Replicated, Shard, is_whole
from hgc.ir.rules import Call, cases
from hgc.ir.rules.collectives import COLLECTIVES, transition
from hgc.ir.rules.core import named_arguments
from hgc.ir.value import Info, Value, info


def outputs_need_gradient(known: Info) -> bool:
    values = known.value if isinstance(known.value, tuple) else (known.value,)
    return any(v.requires_grad for v in values if isinstance(v, Value))


def derive(node: fx.Node, call: Call, recorded: tuple[Placement, ...] = ()) -> tuple[Placement, ...]:
    """Placements of a node's outputs on ``call.axis``, given its operands' (``Operand.found``).

    Where several are true (a broadcast value may be made whole or in any shard's shape) the ``recorded`` one is preferred.

    Raises :class:`~hgc.errors.ShardingError` with what was expected if no rule allows the inputs.
    """
    if node.target in COLLECTIVES and named_arguments(node)["axis"] == call.axis:
        return (_collective(node, call),)
    values = tuple(as_value(operand.found) for operand in call.operands)
    matches = [case for case in cases(call) if case.rewrite is None and case.inputs == values]
    if not matches:
        raise ShardingError(_no_rule(node, call))
    wanted = tuple(as_value(placement) for placement in recorded)
    match = next((case for case in matches if case.outputs == wanted), matches[0])
    return tuple(_with_kind(node, call, output) for output in match.outputs)


def as_value(placement: Placement) -> Placement:
    """Forget the kind of a whole placement, as the rules do."""
    return Invariant() if is_whole(placement) else placement


def _collective(node: fx.Node, call: Call) -> Placement:
    needed, given = transition(node.target, named_arguments(node))
    (operand,) = call.operands
    if not operand.requires_grad:
        needed, given = as_value(needed), as_value(given)
    for shard in (needed, given):
        if isinstance(shard, Shard) and isinstance(shard.parts, tuple) and sum(shard.parts) != operand.shape[shard.dim]:
            raise ShardingError(f"{name_of(node)} has parts {shard.parts} on a dim of size {operand.shape[shard.dim]}")
    if operand.found != needed:
        raise ShardingError(f"{name_of(node)} takes {needed} on axis {call.axis!r}, found {operand.found} from {operand.node.name!r}")
    return given


def _with_kind(node: fx.Node, call: Call, output: Placement) -> Placement:
    """The kind rule: sharded and partial outputs return partial gradients to whole inputs, whole outputs keep one kind."""
    if not outputs_need_gradient(info(node)):
        return output
    kinds = {o.node.name: o.found for o in call.operands if o.requires_grad and is_whole(o.found)}
    if not is_whole(output):
        for name, kind in kinds.items():
            if kind != Replicated():
                raise ShardingError(
                    f"the gradient of {name!r} from {name_of(node)} is partial on axis {call.axis!r}, so it must be R there, found {kind}"
                )
        return output
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{name!r} is {kind}" for name, kind in kinds.items())
        raise ShardingError(f"{name_of(node)} mixes kinds of replication on axis {call.axis!r}: {listed}")
    return next(iter(kinds.values()), Invariant())


def _no_rule(node: fx.Node, call: Call) -> str:
    found = ", ".join(f"{o.node.name!r} is {o.found}" for o in call.operands)
    legal = sorted({"(" + ", ".join(map(str, c.inputs)) + ")" for c in cases(call) if c.rewrite is None})
    return f"no rule for {name_of(node)} on axis {call.axis!r}: {found}; allowed are {' '.join(legal[:8])}"


def name_of(node: fx.Node) -> str:
    """Operator and node name for messages."""
    target = getattr(node.target, "__name__", None) or str(node.target)
    return f"{target} ({node.name!r})"


def found_placements(node: fx.Node, axis: str) -> Mapping[fx.Node, Placement]:
    """Recorded placements of a node's tensor inputs on an axis."""
    return {source: source_value.on(axis) for source in node.all_input_nodes if isinstance(source_value := info(source).value, Value)}

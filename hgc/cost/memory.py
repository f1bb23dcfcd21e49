"""The memory of one rank as named terms: expressions in bytes, for a program lowered by a plan.

Every term is what the fullest rank holds. All of them are alive when backward begins, so their sum bounds the peak; what a term assumes
stands at its place and in docs/design/costs.md.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

import sympy

from hgc.cost.symbolic import ZERO, ProgramCosts, largest
from hgc.errors import HgcError
from hgc.ir.placement import Invariant, Replicated
from hgc.ir.program import BODIES, STATE, Program, State
from hgc.ir.value import Size
from hgc.plan import Plan

OPTIMIZER_COPIES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors as large as the parameter that an optimizer keeps for each, in the parameter's dtype."""
BUCKET_BYTES, SMALLEST_BUCKET_BYTES = 25 * 2**20, 2**20
"""As the runtime's reducer has them."""
_DATA_AXES = ("dp",)
_REPEATED = re.compile(r"(^|\.)\d+$")


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    parameters: the rank's share; all of them, frozen ones too
    buffers: buffers and constants
    gradients: as large as the trained share
    optimizer: the optimizer's state for the trained share
    activations: what blocks save for backward, of all micro-batches that are in flight
    batch: the rank's part of the batch
    gathered: parameters that ZeRO 3 has whole: the root unit, the unit that runs and the one that is fetched
    communication: gradients on their way: the largest bucket, or with ZeRO 3 the largest unit's gradients and their flat copy
    logits: what the backward of the block with the loss holds at once beside what is saved
    workspace: the same for the other blocks
    """

    parameters: Size
    buffers: Size
    gradients: Size
    optimizer: Size
    activations: Size
    batch: Size
    gathered: Size
    communication: Size
    logits: Size
    workspace: Size

    @property
    def total(self) -> Size:
        """Logits and workspace are not needed at the same time; everything else is."""
        terms = {field.name: getattr(self, field.name) for field in fields(self)}
        passing = largest([terms.pop("logits"), terms.pop("workspace")])
        return sympy.Add(passing, *terms.values())

    def expressions(self) -> dict[str, Size]:
        """Terms and total by name, ready for :class:`hgc.cost.symbolic.Formulas`."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "total": self.total}


def memory(program: Program, plan: Plan, costs: ProgramCosts, optimizer: str = "adamw", micro_batches: int = 1) -> Memory:
    """The terms for ``program`` as ``plan`` has lowered it, with ``costs`` of the lowered program.

    ``micro_batches`` run one after the other and divide the batch. Raises ``HgcError`` for an optimizer that is not known.
    """
    if optimizer not in OPTIMIZER_COPIES:
        raise HgcError(f"the optimizer {optimizer!r} is not known; expected one of {', '.join(OPTIMIZER_COPIES)}")
    parameters = [entry for entry in program.state.values() if entry.kind == "parameter"]
    trained = [entry for entry in parameters if entry.value.requires_grad]
    sharded = plan.strategy.zero == 3 and plan.strategy.dp > 1

    def held(entries: Iterable[State]) -> Size:
        return sympy.Add(*(share_bytes(entry, program, sharded) for entry in entries))

    units = _units(program) if sharded else []
    gradients = held(trained)
    loss = _loss_body(program)
    per_batch = _Split(program, micro_batches)
    return Memory(
        parameters=held(parameters),
        buffers=costs.buffer_bytes,
        gradients=gradients,
        optimizer=gradients * OPTIMIZER_COPIES[optimizer],
        activations=per_batch(costs.saved_bytes),
        batch=_batch_bytes(program),
        gathered=_gathered(program, units),
        communication=_unit_gradients(program, units) if sharded else sympy.Integer(_largest_bucket(program, trained)),
        logits=per_batch(costs.bodies[loss].largest_step_bytes),
        workspace=per_batch(largest(body.largest_step_bytes for name, body in costs.bodies.items() if name != loss)),
    )


def local_shape(entry: State, program: Program) -> tuple[Size, ...]:
    return entry.value.local_shape(program.mesh)


def local_bytes(entry: State, program: Program) -> Size:
    """A rank's part as the graph has it, before ZeRO."""
    return sympy.Mul(entry.value.dtype.itemsize, *local_shape(entry, program))


def share_bytes(entry: State, program: Program, sharded: bool) -> Size:
    """What the fullest rank keeps of a parameter: with ZeRO 3 the first part of dim 0, rounded up."""
    if not (sharded and _is_summed(entry, program) and local_shape(entry, program)):
        return local_bytes(entry, program)
    first, *rest = local_shape(entry, program)
    ranks = sympy.prod([program.mesh[axis] for axis in _data_axes(program)])
    return sympy.Mul(entry.value.dtype.itemsize, sympy.ceiling(first / ranks), *rest)


def _data_axes(program: Program) -> list[str]:
    return [axis for axis in program.mesh if axis in _DATA_AXES]


def _is_summed(entry: State, program: Program) -> bool:
    """Does the runtime sum its gradient over all data axes? A frozen parameter counts as summed where it is whole."""
    axes = _data_axes(program)
    kinds = (Replicated(),) if entry.value.requires_grad else (Replicated(), Invariant())
    return bool(axes) and all(entry.value.on(axis) in kinds for axis in axes)


class _Split:
    """Expressions for one of several micro-batches."""

    def __init__(self, program: Program, parts: int) -> None:
        self._smaller = {symbol: symbol / parts for symbol, found in program.symbols.items() if found.meaning == "batch"}

    def __call__(self, expression: Size) -> Size:
        return expression.xreplace(self._smaller)


def _batch_bytes(program: Program) -> Size:
    total = ZERO
    for node in program.inputs():
        value = node.meta["hgc"].value
        total += sympy.Mul(value.dtype.itemsize, *value.local_shape(program.mesh))
    return total


def _loss_body(program: Program) -> str:
    """The body of the block that computes the loss."""
    node = program.output()
    while node.op != "call_module":
        node = node.all_input_nodes[0]
    return str(node.target).removeprefix(BODIES)


# -- gradients on their way -------------------------------------------------------------------------------------------------------------


def _largest_bucket(program: Program, trained: list[State]) -> int:
    """Buckets fill in reverse order; gradients of the next one exist while its buffer waits for them."""
    sizes = [int(local_bytes(entry, program)) for entry in reversed(trained) if _is_summed(entry, program)]
    limit = min(BUCKET_BYTES, max(sum(sizes) // 4, SMALLEST_BUCKET_BYTES))
    found = filled = 0
    for size in sizes:
        filled = filled + size if filled + size <= limit else size
        found = max(found, filled)
    return found


def _units(program: Program) -> list[list[State]]:
    """Parameters of each unit that ZeRO 3 gathers as one: the root unit first, then each repeated block."""
    uses: dict[str, set[str]] = {}
    for block in program.blocks():
        for node in block.node.all_input_nodes:
            if node.op == "get_attr":
                uses.setdefault(str(node.target).removeprefix(STATE), set()).add(block.path)
    root: list[State] = []
    blocks: dict[str, list[State]] = {}
    for name, paths in uses.items():
        entry = program.state[name]
        if entry.kind == "parameter" and _is_summed(entry, program) and local_shape(entry, program):
            alone = len(paths) == 1 and _REPEATED.search(next(iter(paths)))
            (blocks.setdefault(next(iter(paths)), []) if alone else root).append(entry)
    return [root, *blocks.values()]


def _unit_bytes(program: Program, unit: Iterable[State]) -> Size:
    return sympy.Add(*(local_bytes(entry, program) for entry in unit))


def _gathered(program: Program, units: list[list[State]]) -> Size:
    """The root unit stays whole until its backward; of the blocks one runs while the next is fetched."""
    if not units:
        return ZERO
    blocks = sorted((int(_unit_bytes(program, unit)) for unit in units[1:]), reverse=True)
    return _unit_bytes(program, units[0]) + sum(blocks[:2])


def _unit_gradients(program: Program, units: list[list[State]]) -> Size:
    """A unit's whole gradients, and the flat copy that is reduced and scattered."""
    return 2 * sympy.Max(ZERO, *(_unit_bytes(program, (e for e in unit if e.value.requires_grad)) for unit in units))

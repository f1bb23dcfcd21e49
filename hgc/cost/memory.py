"""The memory of one rank as named terms: expressions in bytes, for a program lowered by a plan.

Every term is what the fullest rank holds. All of them are alive when backward begins, so their sum bounds the peak; what a term assumes
stands at its place and in docs/design/costs.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import sympy

from hgc.cluster import Device
from hgc.cost.execution import EAGER, Execution
from hgc.cost.retention import program_retained
from hgc.cost.shares import Shares, Unit, add
from hgc.cost.symbolic import ZERO, ProgramCosts, largest
from hgc.errors import HgcError
from hgc.ir.program import Program, State
from hgc.ir.value import Size, value
from hgc.plan import Plan
from hgc.strategy import Strategy

OPTIMIZER_COPIES: Mapping[str, int] = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors as large as the parameter that an optimizer keeps for each, in the dtype that it updates."""


def optimizer_copies(optimizer: str) -> int:
    """Of :data:`OPTIMIZER_COPIES`; raises ``HgcError`` for an optimizer that is not known."""
    if optimizer not in OPTIMIZER_COPIES:
        raise HgcError(f"the optimizer {optimizer!r} is not known; expected one of {', '.join(OPTIMIZER_COPIES)}")
    return OPTIMIZER_COPIES[optimizer]


@dataclass(frozen=True)
class Reserve:
    """Memory of a device that no tensor of the program holds.

    Args:
        context_bytes: the CUDA context with its loaded kernels, and cuBLAS' workspaces.
        communicator_bytes: NCCL's buffers, for each group that a rank is in.
    """

    context_bytes: int = 0
    communicator_bytes: int = 0


NO_RESERVE = Reserve()
GPU_RESERVE = Reserve(context_bytes=600 * 2**20, communicator_bytes=16 * 2 * 4 * 2**20)
"""Assumptions, measured nowhere in this project. Context: half a GiB and more on recent cards, as ``nvidia-smi`` shows it for an empty
process, and 32 MiB of cuBLAS workspace. NCCL: ``NCCL_BUFFSIZE`` is 4 MiB, to send and to receive, on 16 channels. What the allocator
loses is ``Execution.fragmentation``."""


def reserve_of(device: Device) -> Reserve:
    """Nothing for a CPU, which has no memory of its own."""
    return GPU_RESERVE if device.type == "cuda" else NO_RESERVE


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank.

    parameters: what it keeps between steps, frozen ones too; with ZeRO its share of them
    master: a further copy for the optimizer, where ``Precision.master`` is another dtype and ZeRO does not make it the share
    buffers: buffers and constants
    gradients: as they are added up over micro-batches
    optimizer: the optimizer's state for the trained share
    activations: what blocks save for backward, of all micro-batches that are in flight; with autocast, the casts of parameters too
    recomputed: what the block whose backward runs has saved again
    batch: the rank's part of the batch
    gathered: parameters that ZeRO has whole: with 3 the root unit, the unit that runs and the one that is fetched, with 1 and 2 all
    communication: gradients on their way: the largest bucket, or with ZeRO the largest unit's gradients and their flat copy
    logits: what the backward of the block with the loss holds at once beside what is saved
    workspace: the same for the other blocks
    reserve: what the driver, NCCL and the allocator take, see :class:`Reserve`
    """

    parameters: Size
    master: Size
    buffers: Size
    gradients: Size
    optimizer: Size
    activations: Size
    recomputed: Size
    batch: Size
    gathered: Size
    communication: Size
    logits: Size
    workspace: Size
    reserve: Size

    @property
    def total(self) -> Size:
        """Logits are not needed while another block's backward runs; everything else is alive at once."""
        terms = {field.name: getattr(self, field.name) for field in fields(self)}
        passing = largest([terms.pop("logits"), terms.pop("workspace") + terms.pop("recomputed")])
        return sympy.Add(passing, *terms.values())

    def expressions(self) -> dict[str, Size]:
        """Terms and total by name, ready for :class:`hgc.cost.symbolic.Formulas`."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "total": self.total}


def memory(
    program: Program,
    plan: Plan,
    costs: ProgramCosts,
    optimizer: str = "adamw",
    micro_batches: int = 1,
    *,
    in_flight: int = 1,
    strategy: Strategy | None = None,
    execution: Execution = EAGER,
    reserve: Reserve = NO_RESERVE,
) -> Memory:
    """The terms for ``program`` as ``plan`` has lowered it, with ``costs`` of the lowered program in the plan's precision.

    ``micro_batches`` divide the batch; the activations of ``in_flight`` of them are alive at once (a schedule tells how many).
    ``strategy``: of this stage, by default the plan's. Raises ``HgcError`` for an optimizer that is not known.
    """
    copies = optimizer_copies(optimizer)
    strategy = strategy or plan.strategy
    shares = Shares(program, strategy, plan.precision, execution)
    recompute = dict.fromkeys(costs.repeated, strategy.recompute)
    kept = program_retained(program, costs.bodies, recompute, execution)
    per_batch = _Split(program, micro_batches)
    loss = [costs.bodies[name].largest_step_bytes for name in costs.with_loss]
    others = [body.largest_step_bytes for name, body in costs.bodies.items() if name not in costs.with_loss]
    handed_on = _handed_on(program) if execution.keeps_outputs else ZERO
    activations, recomputed = per_batch(kept.saved_bytes + handed_on) * in_flight, per_batch(kept.recomputed)
    gathered = _gathered(shares)
    found = Memory(
        parameters=add(shares.held_numel(entry) * _kept_width(shares, entry) for entry in shares.parameters),
        master=add(shares.local_numel(entry) * shares.stored(entry) for entry in shares.trained if shares.has_copy(entry)),
        buffers=costs.buffer_bytes,
        gradients=_gradients(shares, micro_batches, execution),
        optimizer=add(shares.held_numel(entry) * shares.stored(entry) for entry in shares.trained) * copies,
        activations=activations,
        recomputed=recomputed,
        batch=_batch_bytes(program),
        gathered=gathered,
        communication=_communication(shares, execution),
        logits=per_batch(largest(loss)),
        workspace=per_batch(largest(others)),
        reserve=ZERO,
    )
    return replace(found, reserve=_reserve(reserve, program, found.total, execution)) if reserve != NO_RESERVE else found


class _Split:
    """Expressions for one of several micro-batches."""

    def __init__(self, program: Program, parts: int) -> None:
        self._smaller = {symbol: symbol / parts for symbol, found in program.symbols.items() if found.meaning == "batch"}

    def __call__(self, expression: Size) -> Size:
        return expression.xreplace(self._smaller)


def _batch_bytes(program: Program) -> Size:
    """What comes from another stage has a gradient; it is an activation."""
    values = [value(node) for node in program.inputs()]
    return add(sympy.Mul(each.dtype.itemsize, *each.local_shape(program.mesh)) for each in values if not each.requires_grad)


def _handed_on(program: Program) -> Size:
    """What a pipeline stage sends to the next."""
    values = [value(node) for node in program.outputs()] if program.results else []
    return add(sympy.Mul(each.dtype.itemsize, *each.local_shape(program.mesh)) for each in values)


def _reserve(reserve: Reserve, program: Program, tensors: Size, execution: Execution) -> Size:
    groups = len(program.mesh) + bool(program.mesh)  # one for each axis, and the world
    fixed = reserve.context_bytes + reserve.communicator_bytes * groups
    return sympy.Integer(fixed) + tensors * sympy.Rational(str(execution.fragmentation))


# -- state and gradients ----------------------------------------------------------------------------------------------------------------


def _kept_width(shares: Shares, entry: State) -> int:
    return shares.stored(entry) if shares.is_sharded(entry) else shares.kept(entry)


def _gradients(shares: Shares, micro_batches: int, execution: Execution) -> Size:
    """Added up in the wider of the parameters' and the sums' dtypes; ZeRO 1 has them whole until the last micro-batch."""
    total = ZERO
    for entry in shares.trained:
        kept, summed = shares.kept(entry), shares.summed(entry)
        whole = shares.local_numel(entry) * max(kept, summed)
        if execution.keeps_gradients and kept < summed and micro_batches > 1:
            total += shares.local_numel(entry) * kept
        if execution.master_gradients and shares.has_copy(entry) and summed < shares.stored(entry):
            total += shares.local_numel(entry) * shares.stored(entry)
        if not shares.is_sharded(entry) or _in_place(shares, execution):
            total += whole
        else:
            total += shares.held_numel(entry) * shares.stored(entry) + (whole if shares.zero == 1 and micro_batches > 1 else ZERO)
    return total


def _in_place(shares: Shares, execution: Execution) -> bool:
    """Are gradients summed and shared out in the buffers that they were made in, as in Megatron-Core's distributed optimizer?"""
    return execution.state_ahead and shares.zero in (1, 2)


def _gathered(shares: Shares) -> Size:
    """With ZeRO 3 the root unit stays whole until its backward; of the blocks one runs while the next is fetched."""
    if not shares.units:
        return ZERO
    root, *blocks = (_whole_bytes(shares, unit) for unit in shares.units)
    return root + sum(sorted(blocks, key=int, reverse=True)[: 2 if shares.zero == 3 else None])


def _whole_bytes(shares: Shares, unit: Unit) -> Size:
    return add(shares.local_numel(entry) * shares.gathered(entry, unit) for entry in unit.entries)


def _communication(shares: Shares, execution: Execution) -> Size:
    """The next bucket's gradients exist while its buffer waits for them; a unit's, and the flat copy that is reduced and scattered."""
    if execution.traffic_bytes and shares.trained and shares.axes:
        return sympy.Integer(execution.traffic_bytes)
    if _in_place(shares, execution):
        return ZERO
    buckets = [sum(int(shares.local_numel(entry)) * shares.summed(entry) for entry in bucket) for _, bucket in shares.buckets()]
    units = [
        add(shares.local_numel(e) * (shares.gathered(e, unit) + shares.summed(e)) for e in unit.entries if e.value.requires_grad)
        for unit in shares.units
    ]
    return max([ZERO, *map(sympy.Integer, buckets), *units], key=int)

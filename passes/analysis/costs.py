"""What every node, block and the whole program costs, as expressions in its symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from hgc.cost.dtypes import StepDtypes, dtypes_of
from hgc.cost.execution import EAGER, Execution
from hgc.cost.retention import local_bytes, program_retained
from hgc.cost.saved import measure
from hgc.cost.shares import Shares
from hgc.cost.symbolic import BodyCost, ProgramCosts
from hgc.ir.program import BODIES, STATE, Program
from hgc.ir.value import Size, info, value
from hgc.passes.base import Analysis
from hgc.plan import Precision
from hgc.strategy import Strategy


@dataclass(frozen=True)
class BlockCosts(Analysis):
    """FLOPs, bytes, kernels, saved activations and communication of one rank, single-device or lowered; each distinct body once.

    ``precision``: the dtypes that the runtime (or the framework that ``execution`` describes) would run it in; by default those of the
    trace. ``zero``: with ZeRO, blocks under autocast get their matrices in its dtype and keep no copies.
    """

    name = "block-costs"
    precision: Precision = field(default_factory=Precision)
    execution: Execution = EAGER
    zero: int = 0

    def run(self, program: Program) -> ProgramCosts:
        bodies, notes = _measured(program, dtypes_of(self.precision, self.execution), self._gathered(program))
        kept = program_retained(program, bodies)
        return ProgramCosts(
            bodies=bodies,
            calls=dict(Counter(block.body for block in program.blocks())),
            symbols=tuple(program.symbols),
            saved_bytes=kept.saved_bytes,
            saved_batch_bytes=kept.batch,
            parameter_bytes=_state_bytes(program, "parameter"),
            buffer_bytes=_state_bytes(program, "buffer") + _state_bytes(program, "constant"),
            notes=(*notes, *(note for body in bodies.values() for note in body.notes)),
            with_loss=_with_loss(program),
            repeated=frozenset(block.body for block in program.blocks() if block.repeats),
        )

    def _gathered(self, program: Program) -> dict[str, torch.dtype]:
        """Parameters that ZeRO gathers in another dtype than they are kept in."""
        if not self.zero:
            return {}
        units = Shares(program, Strategy(dp=2, zero=self.zero), self.precision, self.execution).units
        return {entry.name: unit.gathered for unit in units if unit.gathered is not None for entry in unit.entries}


def _measured(program: Program, dtypes: StepDtypes, gathered: Mapping[str, torch.dtype]) -> tuple[dict[str, BodyCost], list[str]]:
    """Bodies in order of their first calls: what one computes decides the dtypes of the next."""
    found: dict[fx.Node, torch.dtype] = {}
    given: dict[str, tuple[torch.dtype, ...]] = {}
    bodies: dict[str, BodyCost] = {}
    notes: list[str] = []
    for node in program.root.graph.nodes:
        if node.op == "placeholder":
            found[node] = dtypes.other(value(node).dtype)
        elif node.op == "get_attr":
            state = program.state[str(node.target).removeprefix(STATE)]
            declared = state.value.dtype
            kept = dtypes.kept(declared, len(state.value.shape)) if state.kind == "parameter" else dtypes.other(declared)
            found[node] = gathered.get(state.name, kept)
        elif node.op == "call_module":
            name = str(node.target).removeprefix(BODIES)
            wanted = tuple(found[argument] for argument in node.all_input_nodes)
            if name not in bodies:
                given[name], bodies[name] = wanted, measure(program, name, wanted, dtypes.autocast)
            elif given[name] != wanted:
                notes.append(f"a later call of {name} has inputs of other dtypes than the first; its costs are those of the first")
            found.update({user: bodies[name].outputs[int(str(user.args[1]))].dtype for user in node.users})
    return bodies, notes


def _with_loss(program: Program) -> frozenset[str]:
    """Bodies with a result that is one number."""
    calls = ((block.body, info(block.node).value) for block in program.blocks())
    return frozenset(name for name, values in calls if isinstance(values, tuple) and any(v is not None and not v.shape for v in values))


def _state_bytes(program: Program, kind: str) -> Size:
    """A buffer that nothing reads is kept for checkpoints only."""
    read = {str(node.target).removeprefix(STATE) for node in program.root.graph.nodes if node.op == "get_attr"}
    used = (entry for name, entry in program.state.items() if entry.kind == kind and (name in read or entry.persistent))
    return sympy.Add(*(local_bytes(entry.value, program.mesh) for entry in used))

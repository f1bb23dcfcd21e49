"""What every node, block and the whole program costs, as expressions in its symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

import sympy
from torch import fx

from hgc.cost.saved import measure
from hgc.cost.symbolic import ZERO, BodyCost, OutputCost, ProgramCosts
from hgc.ir.program import STATE, Program
from hgc.ir.value import Size, Value, info, value
from hgc.passes.base import Analysis


@dataclass(frozen=True)
class BlockCosts(Analysis):
    """FLOPs, bytes, saved activations and communication of one rank, single-device or lowered; each distinct body is measured once."""

    name = "block-costs"

    def run(self, program: Program) -> ProgramCosts:
        bodies = {name: measure(program, name) for name in program.bodies}
        saved, saved_batch = _kept_between_blocks(program, bodies)
        calls = Counter(block.body for block in program.blocks())
        inside = sympy.Add(*(bodies[name].saved_bytes * count for name, count in calls.items()))
        return ProgramCosts(
            bodies=bodies,
            calls=dict(calls),
            symbols=tuple(program.symbols),
            saved_bytes=inside + saved,
            saved_batch_bytes=saved_batch,
            parameter_bytes=_state_bytes(program, "parameter"),
            buffer_bytes=_state_bytes(program, "buffer") + _state_bytes(program, "constant"),
            notes=tuple(note for body in bodies.values() for note in body.notes),
            with_loss=_with_loss(program),
        )


def _with_loss(program: Program) -> frozenset[str]:
    """Bodies with a result that is one number."""
    calls = ((block.body, info(block.node).value) for block in program.blocks())
    return frozenset(name for name, values in calls if isinstance(values, tuple) and any(v is not None and not v.shape for v in values))


def local_bytes(found: Value, mesh: dict[str, int]) -> Size:
    """Bytes of a rank's part."""
    return replace(found, shape=found.local_shape(mesh)).nbytes


def _state_bytes(program: Program, kind: str) -> Size:
    """A buffer that nothing reads is kept for checkpoints only."""
    read = {str(node.target).removeprefix(STATE) for node in program.root.graph.nodes if node.op == "get_attr"}
    used = (entry for name, entry in program.state.items() if entry.kind == kind and (name in read or entry.persistent))
    return sympy.Add(*(local_bytes(entry.value, program.mesh) for entry in used))


@dataclass(frozen=True)
class _Memory:
    """Where a value of the root graph lives: what made it, its bytes, whether its maker keeps it, whether it belongs to the batch."""

    maker: fx.Node
    index: int
    bytes: Size
    kept: bool
    batch: bool = False


def _kept_between_blocks(program: Program, bodies: dict[str, BodyCost]) -> tuple[Size, Size]:
    """Bytes of block inputs that some block keeps and whose maker does not, and of the batch's tensors; each memory once."""
    memory: dict[fx.Node, _Memory] = {}
    added: dict[tuple[fx.Node, int], _Memory] = {}
    for node in program.root.graph.nodes:
        if node.op == "placeholder":
            memory[node] = _Memory(node, 0, local_bytes(value(node), program.mesh), kept=False, batch=True)
        elif node.op == "call_module":
            cost = bodies[str(node.target).removeprefix("bodies.")]
            for position in cost.kept_inputs:
                argument = node.args[position]
                if isinstance(argument, fx.Node) and argument in memory and not memory[argument].kept:
                    found = memory[argument]
                    added[found.maker, found.index] = found
            for user, index in _results(node):
                memory.update(_result_memory(node, user, index, cost.outputs[index], memory))
    return (
        sympy.Add(ZERO, *(found.bytes for found in added.values() if not found.batch)),
        sympy.Add(ZERO, *(found.bytes for found in added.values() if found.batch)),
    )


def _results(call: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    for user in call.users:
        index = user.args[1]
        assert isinstance(index, int)
        yield user, index


def _result_memory(call: fx.Node, user: fx.Node, index: int, cost: OutputCost, memory: dict[fx.Node, _Memory]) -> dict[fx.Node, _Memory]:
    if cost.input is None:
        return {user: _Memory(call, index, cost.storage_bytes, cost.kept)}
    source = call.args[cost.input]
    assert isinstance(source, fx.Node)
    return {user: memory[source]} if source in memory and not str(source.target).startswith(STATE) else {}

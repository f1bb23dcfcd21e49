"""What blocks keep for backward, under recomputation and with fused chains, each memory once in the whole program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import sympy
from torch import fx

from hgc.cost.execution import EAGER, Execution
from hgc.cost.fusion import fused_kept
from hgc.cost.symbolic import ZERO, BodyCost, Kept, NodeCost, largest
from hgc.cost.work import attention_core, gathers
from hgc.ir.program import BODIES, STATE, Program
from hgc.ir.value import Size, Value, value


@dataclass(frozen=True)
class Retained:
    """What one call of a body keeps: bytes inside it, positions of inputs, which outputs; and what its backward has for a while, when it
    has run a part of forward again."""

    inside: Size
    inputs: tuple[int, ...]
    outputs: tuple[bool, ...]
    recomputed: Size = ZERO


@dataclass(frozen=True)
class ProgramRetained:
    """Of one micro-batch on one rank. ``inside``: what blocks keep of their own. ``between``: block inputs that some block keeps and their
    makers do not, with those that come from another pipeline stage. ``batch``: the same of the batch's tensors. ``recomputed``: the most
    that one block's backward holds again."""

    inside: Size
    between: Size
    batch: Size
    recomputed: Size

    @property
    def saved_bytes(self) -> Size:
        return self.inside + self.between


def retained(body: BodyCost, recompute: str = "none", execution: Execution = EAGER) -> Retained:
    """What a call of ``body`` keeps. ``recompute`` as in ``Strategy``."""
    whole = _kept(body, execution)
    if recompute == "full":
        inputs = tuple(position for position, is_state in enumerate(body.state) if not is_state)
        return Retained(ZERO, inputs, (False,) * len(body.outputs), _inside(body, whole))
    if recompute == "selective":
        kept = _kept(_without_core(body, execution), execution)
        again = sympy.Add(*(size for memory, size in whole.items() if memory not in kept))
        return _retained(body, kept, again)
    return _retained(body, whole, ZERO)


def program_retained(
    program: Program, bodies: Mapping[str, BodyCost], recomputed: Mapping[str, str] | None = None, execution: Execution = EAGER
) -> ProgramRetained:
    """``recomputed``: body -> what it recomputes, by default nothing."""
    kinds = recomputed or {}
    found = {name: retained(body, kinds.get(name, "none"), execution) for name, body in bodies.items()}
    inside = sympy.Add(*(found[block.body].inside for block in program.blocks()))
    between, batch = _kept_between_blocks(program, bodies, found)
    return ProgramRetained(inside, between, batch, largest(each.recomputed for each in found.values()))


def _kept(body: BodyCost, execution: Execution) -> Mapping[str, Size]:
    if execution.fused:
        return fused_kept(body, execution.regathers)
    sources = {memory: node.inputs[0] for memory, node in gathers(body).items()} if execution.regathers else {}
    kept = {need.memory: need.bytes for node in body.nodes for need in node.needs if need.memory not in sources}
    return kept | {found.memory: found.bytes for found in sources.values() if found.memory not in kept}


def _inside(body: BodyCost, kept: Mapping[str, Size]) -> Size:
    inputs = {found.memory for found in body.inputs}
    return sympy.Add(ZERO, *(size for memory, size in kept.items() if memory not in inputs))


def _retained(body: BodyCost, kept: Mapping[str, Size], again: Size) -> Retained:
    inputs = tuple(position for position, found in enumerate(body.inputs) if found.memory in kept)
    return Retained(_inside(body, kept), inputs, tuple(output.memory in kept for output in body.outputs), again)


def _without_core(body: BodyCost, execution: Execution) -> BodyCost:
    """Operators of the attention core need what enters the core, and nothing of their own."""
    core = attention_core(body, execution.recompute_written_attention)
    made = {found.memory for node in body.nodes if node.name in core for found in node.results}
    sizes = {found.memory: found.bytes for found in body.inputs}
    for node in body.nodes:
        sizes |= {found.memory: found.bytes for found in node.results if found.memory not in sizes}

    def entering(node: NodeCost) -> tuple[Kept, ...]:
        return tuple(Kept(found.memory, sizes[found.memory]) for found in node.inputs if found.memory not in made)

    nodes = (replace(node, needs=entering(node)) if node.name in core and node.needs else node for node in body.nodes)
    return replace(body, nodes=tuple(nodes))


# -- between blocks -----------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Memory:
    """Where a value of the root graph lives: what made it, its bytes, whether its maker keeps it, whether it belongs to the batch."""

    maker: fx.Node
    index: int
    bytes: Size
    kept: bool
    batch: bool = False


def local_bytes(found: Value, mesh: dict[str, int]) -> Size:
    """Bytes of a rank's part."""
    return replace(found, shape=found.local_shape(mesh)).nbytes


def _kept_between_blocks(program: Program, bodies: Mapping[str, BodyCost], found: Mapping[str, Retained]) -> tuple[Size, Size]:
    """Bytes of block inputs that some block keeps and whose maker does not, and of the batch's tensors; each memory once."""
    memory: dict[fx.Node, _Memory] = {}
    added: dict[tuple[fx.Node, int], _Memory] = {}
    for node in program.root.graph.nodes:
        if node.op == "placeholder":
            known = value(node)
            memory[node] = _Memory(node, 0, local_bytes(known, program.mesh), kept=False, batch=not known.requires_grad)
        elif node.op == "call_module":
            body = str(node.target).removeprefix(BODIES)
            for position in found[body].inputs:
                argument = node.args[position]
                if isinstance(argument, fx.Node) and argument in memory and not memory[argument].kept:
                    entry = memory[argument]
                    if entry.maker.op == "placeholder":
                        entry = replace(entry, bytes=bodies[body].inputs[position].bytes)  # in the dtype that it is computed in
                    added[entry.maker, entry.index] = entry
            for user, index in _results(node):
                memory.update(_result_memory(node, user, index, bodies[body], found[body], memory))
    return (
        sympy.Add(ZERO, *(entry.bytes for entry in added.values() if not entry.batch)),
        sympy.Add(ZERO, *(entry.bytes for entry in added.values() if entry.batch)),
    )


def _results(call: fx.Node) -> Iterator[tuple[fx.Node, int]]:
    for user in call.users:
        index = user.args[1]
        assert isinstance(index, int)
        yield user, index


def _result_memory(
    call: fx.Node, user: fx.Node, index: int, body: BodyCost, kept: Retained, memory: Mapping[fx.Node, _Memory]
) -> dict[fx.Node, _Memory]:
    cost = body.outputs[index]
    if cost.input is None:
        return {user: _Memory(call, index, cost.storage_bytes, kept.outputs[index])}
    source = call.args[cost.input]
    assert isinstance(source, fx.Node)
    return {user: memory[source]} if source in memory and not str(source.target).startswith(STATE) else {}

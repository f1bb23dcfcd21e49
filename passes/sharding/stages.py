"""Cut a traced program into the stages of a pipeline: each an ordinary program that is lowered, verified and emitted on its own.

A value that crosses a cut leaves one stage under a name (``Program.results``) and is a placeholder of that name, of role
``"received"``, in every stage that reads it, also far behind the next. What comes from the batch alone (masks, rotary tables,
positions) is not sent but computed again where it is needed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from hgc.errors import PlanError, ShardingError
from hgc.ir.program import BODIES, RECEIVED, STATE, Program, copy_graph_module, new_root
from hgc.ir.rules.core import updated_arguments
from hgc.ir.sizes import SYM_SIZE
from hgc.ir.value import Info, info, is_size, set_info, value
from hgc.plan import Plan
from hgc.tracing.prune import prune

_AGAIN = "Again"
"""Behind the name of a body of which a later stage computes a part again."""


def cut(program: Program, plan: Plan) -> tuple[Program, ...]:
    """The stages of a traced program, blocks counted in the order of the root graph; without stages in the plan one copy of it.

    Composed on one device (:func:`run_stages`) they compute the program's loss and gradients. State that several stages read is in
    the state of each, and ``State.stages`` lists them; what no block reads goes to the first. Stages that do the same with other layers
    have one :func:`~hgc.ir.hashing.structure_hash`. Raises :class:`~hgc.errors.PlanError` if the plan's blocks are not as many as the
    program's, :class:`~hgc.errors.ShardingError` for a buffer that a block updates and several stages read.
    """
    if program.mesh:
        raise ShardingError(f"{program.name} is lowered for mesh {program.mesh} already; cut the traced program, then lower each stage")
    if not plan.stages:
        return (program.copy(),)
    origin = _Origin(program, _owners(program, plan))
    needs = [_needs(origin, stage) for stage in range(len(plan.stages))]
    sent = {node for need in needs for node in need.received}
    stages = tuple(_build(origin, stage, need, sent) for stage, need in enumerate(needs))
    _share_state(program, stages)
    return stages


def run_stages(stages: Iterable[Program], inputs: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> Tensor:
    """The loss of stages that follow one another on one device; arguments as for ``Program.run``."""
    values = dict(inputs)
    results: tuple[Tensor, ...] = ()
    for stage in stages:
        results = stage.run_all(values, state)
        values.update(zip(stage.results, results, strict=False))
    (loss,) = results
    return loss


def stage_edges(stages: Sequence[Program]) -> tuple[tuple[int, int], ...]:
    """(stage, later stage that reads it), each pair once, in order."""
    makers = {name: index for index, stage in enumerate(stages) for name in stage.results}
    names = [(str(node.target), reader) for reader, stage in enumerate(stages) for node in stage.inputs() if info(node).role == RECEIVED]
    return tuple(sorted({(makers[name], reader) for name, reader in names}))


def stage_plan(plan: Plan, stage: int) -> Plan:
    """What one stage is lowered by: the plan with the stage's strategy and no stages."""
    return replace(plan, strategy=plan.strategies[stage], stages=())


def unsplit_reason(stage: Program, plan: Plan) -> str:
    """Why the stage's backward is not split into inputs and weights, where the schedule would have it so; ``""`` if it is."""
    received = {node for node in stage.inputs() if info(node).role == RECEIVED and value(node).requires_grad}
    if not plan.schedule.startswith("zb") or not received:
        return ""
    if plan.strategy.zero:
        return (
            f"{stage.name} does its whole backward at once in {plan.schedule}: with zero {plan.strategy.zero} weights are gathered for it"
        )
    origin = _Origin(stage, {})
    for name, node in zip(stage.results, stage.outputs(), strict=False):
        if value(node).requires_grad and not _reaches(origin, node, received):
            return f"{stage.name} does its whole backward at once in {plan.schedule}: its result {name!r} depends on no other stage"
    return ""


def _reaches(origin: _Origin, node: fx.Node, targets: set[fx.Node]) -> bool:
    waiting, seen = [node], set[fx.Node]()
    while waiting:
        current = waiting.pop()
        if current in targets:
            return True
        if current.op == "call_function" and current not in seen:
            seen.add(current)
            waiting.extend(origin.sources(current))
    return False


def _owners(program: Program, plan: Plan) -> dict[fx.Node, int]:
    """Block node -> stage."""
    blocks = [block.node for block in program.blocks()]
    counts = [stage.blocks for stage in plan.stages]
    if sum(counts) != len(blocks):
        last = counts[-1] + len(blocks) - sum(counts)
        remedy = f"give the last stage {last}" if last > 0 else f"use at most {len(blocks)} stages and share the blocks among them"
        raise PlanError(
            f"the plan's stages have {' + '.join(map(str, counts))} = {sum(counts)} blocks, but {program.name} has {len(blocks)}; {remedy}"
        )
    owners = [stage for stage, count in enumerate(counts) for _ in range(count)]
    return dict(zip(blocks, owners, strict=True))


# -- what a stage needs ---------------------------------------------------------------------------------------------------------------


@dataclass
class _Origin:
    """The whole program, the stage of each block, and which values come from the batch alone."""

    program: Program
    owners: dict[fx.Node, int]
    _known: dict[fx.Node, bool] = field(default_factory=dict)

    def owner(self, node: fx.Node) -> int:
        return self.owners[_made_by(node)[0]]

    def body(self, call: fx.Node) -> fx.GraphModule:
        return self.program.body(_body_name(call))

    def from_batch(self, node: fx.Node) -> bool:
        """Is the value a function of the user's inputs and of buffers, without randomness?"""
        if node.op != "call_function":
            return node.op == "placeholder" or info(node).role == "buffer"
        if node not in self._known:
            call, index = _made_by(node)
            pure = not any(map(_is_impure, _cone(self.body(call).graph, [index]).nodes))
            self._known[node] = pure and all(self.from_batch(argument) for argument in self.sources(node))
        return self._known[node]

    def sources(self, node: fx.Node) -> list[fx.Node]:
        """The arguments of a block that one of its results depends on."""
        call, index = _made_by(node)
        graph = self.body(call).graph
        needed = _cone(graph, [index]).nodes
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        return [argument for argument, n in zip(_arguments(call), placeholders, strict=True) if n in needed]


def _made_by(node: fx.Node) -> tuple[fx.Node, int]:
    """The block and the output that a value of the root graph is."""
    call, index = node.args
    assert node.target is operator.getitem
    assert isinstance(call, fx.Node)
    assert isinstance(index, int)
    return call, index


def _arguments(call: fx.Node) -> list[fx.Node]:
    return [argument for argument in call.args if isinstance(argument, fx.Node)]


def _body_name(call: fx.Node) -> str:
    return str(call.target).removeprefix(BODIES)


@dataclass(frozen=True)
class _Cone:
    """The nodes of a body that some outputs depend on, and for sizes read off inputs that are not among them: where else to read."""

    nodes: set[fx.Node]
    sizes: dict[fx.Node, tuple[fx.Node, int]]


def _cone(graph: fx.Graph, indices: Sequence[int]) -> _Cone:
    (output,) = (node for node in graph.nodes if node.op == "output")
    nodes: set[fx.Node] = set()
    waiting = [output.args[0][index] for index in indices]
    while waiting:
        node = waiting.pop()
        assert isinstance(node, fx.Node)
        if node not in nodes:
            nodes.add(node)
            waiting.extend([] if node.target is SYM_SIZE else node.all_input_nodes)
    sizes = {}
    for node in [node for node in graph.nodes if node.target is SYM_SIZE and node in nodes]:
        (source,) = node.all_input_nodes
        inputs = (found for found in graph.nodes if found.op == "placeholder" and found in nodes)
        carriers = ((found, dim) for found in inputs for dim, size in enumerate(value(found).shape) if size == info(node).size)
        carrier = None if source in nodes else next(carriers, None)
        if carrier is None:
            nodes.add(source)
        else:
            sizes[node] = carrier
    return _Cone(nodes, sizes)


def _is_impure(node: fx.Node) -> bool:
    if node.op != "call_function" or is_size(node) or node.target is operator.getitem:
        return False
    random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return random or getattr(node.target, "__name__", "") in ("dropout", "attention") or bool(updated_arguments(node))


@dataclass(frozen=True)
class _Needs:
    """Values of earlier stages that a stage reads, in order of first use: those it receives, and those it computes again."""

    received: dict[fx.Node, None]
    again: dict[fx.Node, None]


def _needs(origin: _Origin, stage: int) -> _Needs:
    received: dict[fx.Node, None] = {}
    again: dict[fx.Node, None] = {}
    waiting = deque(node for call, owner in origin.owners.items() if owner == stage for node in _arguments(call))
    while waiting:
        node = waiting.popleft()
        if node.op != "call_function" or origin.owner(node) == stage or node in again:
            continue
        if origin.from_batch(node):
            again[node] = None
            waiting.extend(origin.sources(node))
        else:
            received[node] = None
    return _Needs(received, again)


# -- the program of a stage -----------------------------------------------------------------------------------------------------------


def _build(origin: _Origin, stage: int, needs: _Needs, sent: set[fx.Node]) -> Program:
    program, graph = origin.program, fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    bodies: dict[str, fx.GraphModule] = {}
    for node in program.inputs():
        values[node] = _copy(graph, node, values)
    for node in needs.received:
        values[node] = graph.placeholder(node.name)
        set_info(values[node], Info(value(node), role=RECEIVED))
    read = _state_read(origin, stage, needs)
    for node in program.root.graph.nodes:
        if node in read:
            values[node] = _copy(graph, node, values)
        elif node.op == "call_module" and origin.owners[node] == stage:
            _call(origin, node, graph, values, bodies)
        elif node.op == "call_module":
            _call_again(origin, node, [user for user in node.users if user in needs.again], graph, values, bodies)
    results = [node for node in program.root.graph.nodes if node in sent and origin.owner(node) == stage]
    is_last = stage == max(origin.owners.values())
    graph.output(values[program.output()] if is_last else tuple(values[node] for node in results))
    state = {name: program.state[name] for name in (str(node.target).removeprefix(STATE) for node in read)}
    made = replace(program, root=new_root(graph, state, bodies), report=list(program.report), name=f"{program.name}Stage{stage}")
    made.results = () if is_last else tuple(node.name for node in results)
    prune(made)
    _drop_inputs(made)
    return made


def _state_read(origin: _Origin, stage: int, needs: _Needs) -> set[fx.Node]:
    """The root nodes of the state that the stage's blocks read, those that compute something again too."""
    own = [node for call, owner in origin.owners.items() if owner == stage for node in _arguments(call)]
    return {node for node in [*own, *(n for found in needs.again for n in origin.sources(found))] if node.op == "get_attr"}


def _call(origin: _Origin, call: fx.Node, graph: fx.Graph, values: dict[fx.Node, fx.Node], bodies: dict[str, fx.GraphModule]) -> None:
    """One of the stage's own blocks, with all its results."""
    name = _body_name(call)
    if name not in bodies:
        bodies[name] = copy_graph_module(origin.program.body(name))
    values[call] = _copy(graph, call, values)
    for user in sorted(call.users, key=lambda node: _made_by(node)[1]):
        values[user] = _copy(graph, user, values)


def _call_again(
    origin: _Origin,
    call: fx.Node,
    results: Sequence[fx.Node],
    graph: fx.Graph,
    values: dict[fx.Node, fx.Node],
    bodies: dict[str, fx.GraphModule],
) -> None:
    """The part of an earlier stage's block that computes ``results``."""
    if not results:
        return
    results = sorted(results, key=lambda node: _made_by(node)[1])
    indices = [_made_by(node)[1] for node in results]
    body, kept = _slice(origin.body(call), indices)
    name = _body_name(call) + _AGAIN
    while name in bodies:  # another block of the same body, of which perhaps another part is needed
        name += _AGAIN
    bodies[name] = body
    again = graph.call_module(BODIES + name, tuple(values[_arguments(call)[position]] for position in kept))
    known = info(call).value
    assert isinstance(known, tuple)
    set_info(again, replace(info(call), value=tuple(known[index] for index in indices)))
    for position, node in enumerate(results):
        values[node] = graph.call_function(operator.getitem, (again, position))
        set_info(values[node], info(node))


def _slice(body: fx.GraphModule, indices: Sequence[int]) -> tuple[fx.GraphModule, list[int]]:
    """A body that returns some results only, and the positions of the inputs that these need."""
    part = copy_graph_module(body)
    (output,) = (node for node in part.graph.nodes if node.op == "output")
    results = output.args[0]
    assert isinstance(results, list | tuple)
    for size, carrier in _cone(part.graph, indices).sizes.items():
        size.args = carrier
    output.args = (tuple(results[index] for index in indices),)
    part.graph.eliminate_dead_code()
    placeholders = [node for node in part.graph.nodes if node.op == "placeholder"]
    kept = [position for position, node in enumerate(placeholders) if node.users or node in output.all_input_nodes]
    for position, node in enumerate(placeholders):
        if position not in kept:
            part.graph.erase_node(node)
    part.recompile()
    return part, kept


def _copy(graph: fx.Graph, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
    copied = graph.node_copy(node, lambda old: values[old])
    copied.meta = dict(node.meta)
    return copied


def _drop_inputs(stage: Program) -> None:
    """Leave inputs, symbols and assumptions that the stage has nothing to do with."""
    for node in stage.inputs():
        if not node.users:
            stage.root.graph.erase_node(node)
    stage.root.graph.lint()
    known = {symbol for node in stage.inputs() for size in value(node).shape for symbol in size.free_symbols}
    stage.symbols = {symbol: found for symbol, found in stage.symbols.items() if symbol in known}
    stage.assumptions = tuple(relation for relation in stage.assumptions if relation.free_symbols <= known)


# -- state ----------------------------------------------------------------------------------------------------------------------------


def _share_state(program: Program, stages: Sequence[Program]) -> None:
    """Give each stage the state that it reads, in order of first use, and the first stage what no block reads."""
    holders: dict[str, tuple[int, ...]] = dict.fromkeys(program.state, ())
    for index, stage in enumerate(stages):
        read = dict.fromkeys(str(node.target).removeprefix(STATE) for node in stage.root.graph.nodes if node.op == "get_attr")
        for name in read:
            holders[name] = (*holders[name], index)
        stage.state = {name: program.state[name] for name in read}
    for name, entry in program.state.items():
        if not holders[name]:
            stages[0].state[name] = entry
        elif len(holders[name]) > 1:
            if _is_updated(program, name):
                raise ShardingError(
                    f"stages {' and '.join(map(str, holders[name]))} both read buffer {name!r}, which the model updates as it runs; "
                    "move the cut so that one stage has all blocks that read it"
                )
            for index in holders[name]:
                stages[index].state[name] = replace(entry, stages=holders[name])


def _is_updated(program: Program, name: str) -> bool:
    for block in program.blocks():
        placeholders = [node for node in program.body(block.body).graph.nodes if node.op == "placeholder"]
        for placeholder, argument in zip(placeholders, _arguments(block.node), strict=True):
            if argument.target == STATE + name and any(_updates(user, placeholder) for user in placeholder.users):
                return True
    return False


def _updates(user: fx.Node, node: fx.Node) -> bool:
    return user.op == "call_function" and not is_size(user) and user.target is not operator.getitem and node in updated_arguments(user)

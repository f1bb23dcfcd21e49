"""Lower one mesh axis: after it the graph is again a single-device program for the axes still to come.

Each body is lowered once for each distinct tuple of input placements, however many blocks call it.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import sympy
from torch import fx

from hgc.errors import ShardingError
from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard, is_whole, zigzag, zigzag_runs
from hgc.ir.program import BODIES, RECEIVED, STATE, Program, copy_graph_module, new_root
from hgc.ir.rules import Call, Case, cases, make_call, rule_for
from hgc.ir.rules.core import overloads, updated_arguments
from hgc.ir.sizes import SizeBuilder, rebuild_sizes
from hgc.ir.value import Value, info, is_size, set_info, value
from hgc.passes.sharding.kinds import Placements, settle_kinds
from hgc.passes.sharding.layout import AxisLayout
from hgc.passes.sharding.preferences import Preferences
from hgc.passes.sharding.redistribute import operator_for, price

Hints = Mapping[sympy.Symbol, int]

_BROADCASTS = set(overloads("expand", "broadcast_to", "zeros", "ones", "full", "empty.memory_format"))
"""Operators whose result is the same along the dims they create."""

_GATHERED_STATE = 1e18
"""State is not gathered to save activations: the plan placed it where it is. Only where nothing else is legal."""


def lower_axis(program: Program, layout: AxisLayout, hints: Hints) -> Program:
    """Place every value on ``layout.axis`` and insert the collectives this needs.

    ``hints`` gives each size symbol a number that every mesh axis divides; sizes that do not divide under it are left whole. Raises
    :class:`~hgc.errors.ShardingError` if an operator allows no placement.
    """
    return _AxisLowering(program, layout, hints).run()


class _AxisLowering:
    def __init__(self, program: Program, layout: AxisLayout, hints: Hints) -> None:
        self.program, self.layout, self.hints = program, layout, hints
        self.mesh = {**program.mesh, layout.axis: layout.size}
        self.bodies: dict[str, fx.GraphModule] = {}
        self.lowered: dict[tuple[Any, ...], tuple[str, tuple[Placement, ...]]] = {}
        self.placed: dict[fx.Node, Placement] = {}
        self.report: list[str] = []

    def run(self) -> Program:
        root = self.program.root.graph
        for node in root.nodes:
            if node.op == "placeholder":
                self._record(node, self._input(node))
            elif node.op == "get_attr":
                self._record(node, self._state_placement(node))
            elif node.op == "call_module":
                self._call(node)
        return self._finish(root)

    def _input(self, node: fx.Node) -> Placement:
        """Inputs live where the layout says; what comes from another stage lives where a block of this one would have left it."""
        dim = sequence_dim(self.layout, value(node), self.mesh, self.hints) if info(node).role == RECEIVED else None
        return self.layout.inputs.get(node.name, Invariant() if dim is None else Shard(dim))

    def _state_placement(self, node: fx.Node) -> Placement:
        value = info(node).value
        assert isinstance(value, Value)
        return self._by_name(str(node.target).removeprefix(STATE), value)

    def _record(self, node: fx.Node, placement: Placement) -> None:
        known = info(node)
        assert isinstance(known.value, Value)
        self.placed[node] = placement
        set_info(node, replace(known, value=known.value.placed(self.layout.axis, placement)))

    def _call(self, node: fx.Node) -> None:
        body = str(node.target).removeprefix(BODIES)
        inputs = tuple(self.placed[a] for a in node.args if isinstance(a, fx.Node))
        key = (body, inputs)
        if key not in self.lowered:
            variant = _BodyLowering(body, self.program.body(body), inputs, self.layout, self.mesh, self.hints)
            name = self._name(body)
            self.bodies[name] = variant.run()
            self.report.extend(variant.report)
            self.lowered[key] = (name, variant.outputs)
        name, outputs = self.lowered[key]
        node.target = BODIES + name
        known = info(node)
        assert isinstance(known.value, tuple)
        placed = tuple(v.placed(self.layout.axis, p) for v, p in zip(known.value, outputs, strict=True))
        set_info(node, replace(known, value=placed))
        for user in node.users:
            index = user.args[1]
            assert isinstance(index, int)
            self._record(user, outputs[index])

    def _name(self, body: str) -> str:
        name, count = body, 2
        while name in self.bodies:
            name, count = f"{body}_{count}", count + 1
        return name

    def _finish(self, root: fx.Graph) -> Program:
        program = self.program
        if not program.results and self.placed[program.output()] != Invariant():
            loss = self.placed[program.output()]
            raise ShardingError(f"the loss is {loss} on axis {self.layout.axis!r}; it must leave the program invariant")
        graph_module = new_root(root, program.state, self.bodies)
        state = {
            name: replace(s, value=s.value.placed(self.layout.axis, self._by_name(name, s.value))) for name, s in program.state.items()
        }
        report = [*program.report, *dict.fromkeys(self.report)]
        assumptions = _without_implied((*program.assumptions, *(a for a in self._multiples() if a not in program.assumptions)))
        return replace(program, root=graph_module, state=state, mesh=self.mesh, report=report, assumptions=assumptions)

    def _multiples(self) -> tuple[sympy.Basic, ...]:
        """Sizes other than the batch that the axis splits inside the program; inputs themselves are checked where they are cut."""
        found: dict[sympy.Basic, None] = {}
        for body in self.bodies.values():
            for node in body.graph.nodes:
                value = info(node).value if "hgc" in node.meta else None
                for each in value if isinstance(value, tuple) else (value,):
                    relation = self._multiple(each) if isinstance(each, Value) else None
                    if relation is not None:
                        found[relation] = None
        return tuple(found)

    def _multiple(self, value: Value) -> sympy.Basic | None:
        placement = value.on(self.layout.axis)
        if not isinstance(placement, Shard):
            return None
        dim, size = placement.dim, value.shape[placement.dim]
        if not isinstance(size, sympy.Symbol) or self.program.symbols[size].meaning == "batch":
            return None
        ranks = multiple = 1
        for axis, p in value.placements:
            if isinstance(p, Shard) and p.dim == dim:
                ranks *= self.mesh[axis]
                multiple = math.lcm(multiple, ranks * (1 if zigzag_runs(p.parts) is None else 2))
        relation: sympy.Basic = sympy.Eq(sympy.Mod(size, multiple), 0)
        return relation

    def _by_name(self, name: str, value: Value) -> Placement:
        found = self.layout.state.get(name, self.layout.default)
        return Invariant() if is_whole(found) and not value.requires_grad else found


class _BodyLowering:
    """One body under one tuple of input placements."""

    def __init__(
        self, name: str, body: fx.GraphModule, inputs: tuple[Placement, ...], layout: AxisLayout, mesh: dict[str, int], hints: Hints
    ) -> None:
        self.name = name
        self.module = copy_graph_module(body)
        self.graph = self.module.graph
        self.inputs, self.layout, self.mesh, self.hints = inputs, layout, mesh, hints
        self.preferences = Preferences(layout, hints)
        self.placements: Placements = {}
        self.moves: set[fx.Node] = set()
        self.stationary: set[fx.Node] = set()
        self.moved: dict[tuple[fx.Node, Placement], fx.Node] = {}
        self.outputs: tuple[Placement, ...] = ()
        self.report: list[str] = []
        self.sizes = SizeBuilder(self.graph, {axis: size for axis, size in mesh.items() if axis != layout.axis})

    def run(self) -> fx.GraphModule:
        given = iter(self.inputs)
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self.placements[node] = next(given)
                if info(node).role != "input":
                    self.stationary.add(node)
            elif node.op == "output":
                self._place_outputs(node)
            elif node.target is operator.getitem:
                self._place_piece(node)
            elif not is_size(node):
                self._place(node)
        settle_kinds(self.graph, self.layout.axis, self.placements, self.moves)
        self._record()
        self.graph.eliminate_dead_code()
        rebuild_sizes(self.graph, self.mesh, self.layout.axis)
        self.graph.lint()
        self.module.recompile()
        return self.module

    def _found(self, node: fx.Node) -> Placement:
        found = self.placements[node]
        assert not isinstance(found, tuple)
        return found

    def _make_call(self, node: fx.Node) -> Call:
        found = {n: self._found(n) for n in node.all_input_nodes if not is_size(n)}
        return make_call(node, self.layout.axis, self.mesh, self.hints, {n: Invariant() if is_whole(p) else p for n, p in found.items()})

    def _place(self, node: fx.Node) -> None:
        call = self._make_call(node)
        updated = updated_arguments(node)
        makes_mask = (self.name, node.name) in self.layout.masks

        def cost(case: Case) -> float:
            return self._cost(call, case, updated, makes_mask)

        best = min(self._offered(call), key=cost, default=None)
        if best is None or math.isinf(cost(best)):
            found = ", ".join(f"{o.node.name} is {o.found}" for o in call.operands)
            raise ShardingError(f"no rule places {node.name!r} ({node.target}) on axis {self.layout.axis!r}: {found}")
        if rule_for(node.target) is None and any(not is_whole(o.found) for o in call.operands):
            self.report.append(f"{node.target} has no sharding rule and runs replicated on axis {self.layout.axis!r}")
        for operand, placement in zip(call.operands, best.inputs, strict=True):
            if operand.found != placement:
                node.replace_input_with(operand.node, self._move(operand.node, placement, node))
        if best.rewrite is not None:
            node = best.rewrite(node, self.layout.axis, self.layout.size)
        self.placements[node] = best.outputs if isinstance(info(node).value, tuple) else best.outputs[0]
        if call.operands and all(operand.node in self.stationary for operand in call.operands):
            self.stationary.add(node)

    def _offered(self, call: Call) -> Iterator[Case]:
        """Cases that the layout allows; on a zigzag axis also those of whole operands that could be cut in that order."""
        calls = [call]
        if self.layout.zigzag:
            for operand in call.operands:
                for dim in range(operand.rank):
                    if is_whole(operand.found) and self.preferences.is_divided(operand.shape[dim]):
                        cut = replace(operand, found=Shard(dim, zigzag(1)))
                        calls.append(call.seeing(cut))
        for each in calls:
            yield from (case for case in cases(each) if not case.method or case.method in self.layout.methods)

    def _cost(self, call: Call, case: Case, updated: list[fx.Node], makes_mask: bool) -> float:
        total = 0.0
        for operand, wanted in zip(call.operands, case.inputs, strict=True):
            if operand.found != wanted and operand.node in updated:
                return math.inf
            total += self._price(operand.node, operand.found, wanted, self.preferences.size_bytes(operand.shape, operand.dtype.itemsize))
        return total + self.preferences.cost(call, case, makes_mask)

    def _price(self, node: fx.Node, found: Placement, wanted: Placement, size_bytes: float) -> float:
        if found == wanted:
            return 0.0
        if isinstance(found, Shard) and node in self.stationary:
            return _GATHERED_STATE if is_whole(wanted) else math.inf
        actual = self._found(node)
        gradient = _needs_gradient(node) and actual != Replicated()
        return price(actual, wanted, size_bytes, self.layout.size, gradient, self._scatter_dim(node), node in self.stationary)

    def _scatter_dim(self, node: fx.Node) -> int | None:
        """Sequence parallelism scatters partial sums of 3-D activations along the sequence."""
        found = info(node).value
        return sequence_dim(self.layout, found, self.mesh, self.hints) if isinstance(found, Value) else None

    def _move(self, node: fx.Node, wanted: Placement, user: fx.Node) -> fx.Node:
        """The node's value under another placement, made once."""
        if (node, wanted) not in self.moved:
            again = self._again(node, wanted, user)
            self.moved[node, wanted] = again if again is not None else self._collective(node, wanted, user)
        return self.moved[node, wanted]

    def _again(self, node: fx.Node, wanted: Placement, user: fx.Node) -> fx.Node | None:
        """A constant or broadcast value is made in its local shape instead of being sliced, a constant also instead of being gathered."""
        if node.op != "call_function" or node.target not in _BROADCASTS:
            return None
        call = self._make_call(node)
        if call.operands and not is_whole(self._found(node)):
            return None
        same = tuple(o.found for o in call.operands)
        if not any(case.inputs == same and case.outputs == (wanted,) and case.rewrite is None for case in cases(call)):
            return None
        with self.graph.inserting_before(user):
            copy = self.graph.node_copy(node)
        copy.meta = dict(node.meta)
        self.placements[copy] = wanted
        return copy

    def _collective(self, node: fx.Node, wanted: Placement, user: fx.Node) -> fx.Node:
        target, args, kwargs = operator_for(self._found(node), wanted)
        if isinstance(kwargs.get("parts"), sympy.Expr):
            kwargs["parts"] = self.sizes.emit(kwargs["parts"])
        with self.graph.inserting_before(user):
            moved = self.graph.call_function(target, (node, *args, self.layout.axis), kwargs)
        set_info(moved, replace(info(node), role=""))
        self.placements[moved] = wanted
        self.moves.add(moved)
        return moved

    def _place_piece(self, node: fx.Node) -> None:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        found = self.placements[source]
        self.placements[node] = found[index] if isinstance(found, tuple) else found

    def _place_outputs(self, output: fx.Node) -> None:
        results = output.args[0]
        assert isinstance(results, list | tuple)
        moved = []
        for node in results:
            assert isinstance(node, fx.Node)
            wanted = self._boundary(node)
            found = self._found(node)
            moved.append(node if wanted == found or (is_whole(wanted) and is_whole(found)) else self._move(node, wanted, output))
        output.args = (tuple(moved),)

    def _boundary(self, node: fx.Node) -> Placement:
        """What leaves a block: plain shards as they are, 3-D activations along the sequence if asked for, everything else whole."""
        found = self._found(node)
        if isinstance(found, Shard):
            return found if found.is_plain or found.parts == zigzag(1) else Invariant()
        dim = self._scatter_dim(node)
        if dim is not None and found != Replicated() and node.op != "placeholder":
            return Shard(dim)
        return Invariant() if isinstance(found, Partial) else found

    def _record(self) -> None:
        for node in self.graph.nodes:
            if node.op == "output":
                results = node.args[0]
                assert isinstance(results, tuple)
                self.outputs = tuple(self._found(n) for n in results if isinstance(n, fx.Node))
            elif not is_size(node):
                _record(node, self.layout.axis, self.placements[node])


def _without_implied(relations: tuple[sympy.Basic, ...]) -> tuple[sympy.Basic, ...]:
    """Without ``Eq(Mod(s, 2), 0)`` where ``Eq(Mod(s, 4), 0)`` is asked for."""
    multiples = {relation: _multiple_of(relation) for relation in relations}

    def is_implied(relation: sympy.Basic) -> bool:
        own = multiples[relation]
        others = (m for other, m in multiples.items() if m is not None and other != relation)
        return own is not None and any(size == own[0] and number % own[1] == 0 for size, number in others)

    return tuple(relation for relation in relations if not is_implied(relation))


def _multiple_of(relation: sympy.Basic) -> tuple[sympy.Basic, int] | None:
    """``(size, n)`` if the relation says that a size is a multiple of the number ``n``."""
    modulus = relation.args[0] if isinstance(relation, sympy.Eq) and relation.args[1] == 0 else None
    if isinstance(modulus, sympy.Mod) and modulus.args[1].is_Integer:
        return modulus.args[0], int(modulus.args[1])
    return None


def sequence_dim(layout: AxisLayout, found: Value, mesh: Mapping[str, int], hints: Hints) -> int | None:
    """The dim along which the axis splits an activation between blocks, or None if it leaves it whole."""
    dim = layout.sequence_dim
    if dim is None or len(found.shape) != 3 or not found.requires_grad:
        return None
    before = {axis: size for axis, size in mesh.items() if axis != layout.axis}
    length = int(found.local_shape(before)[dim].subs(hints))
    return dim if length % layout.size == 0 and length >= layout.size else None


def _record(node: fx.Node, axis: str, placement: Placement | tuple[Placement, ...]) -> None:
    known = info(node)
    if isinstance(known.value, tuple):
        each = placement if isinstance(placement, tuple) else (placement,) * len(known.value)
        new: Value | tuple[Value, ...] = tuple(v.placed(axis, p) for v, p in zip(known.value, each, strict=True))
    else:
        assert isinstance(known.value, Value)
        assert not isinstance(placement, tuple)
        new = known.value.placed(axis, placement)
    set_info(node, replace(known, value=new))


def _needs_gradient(node: fx.Node) -> bool:
    value = info(node).value
    return isinstance(value, Value) and value.requires_grad

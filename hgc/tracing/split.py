"""From the flat graph with its markers to the two-level program."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import fx

from hgc.ir.hashing import body_hash
from hgc.ir.program import BODIES, STATE, Program, new_root
from hgc.ir.value import Info, Value, info, set_info
from hgc.tracing.capture import Flat, output_of
from hgc.tracing.extract import Cut, cut, relative_name
from hgc.tracing.folding import Marking
from hgc.tracing.glue import GlueNames
from hgc.tracing.names import Namer, activation_name, class_name
from hgc.tracing.regions import Glue, Region, check_chains, check_folded, escapes, read_regions
from hgc.tracing.shortcuts import StartOver


@dataclass(frozen=True)
class _Twin:
    """A traced call that folded calls repeat."""

    body: str
    cut: Cut
    region: Region


@dataclass
class _Builder:
    """Appends blocks to the root graph; ``values`` maps flat nodes to the root's, ``held`` state names to its ``get_attr`` nodes."""

    flat: Flat
    marking: Marking
    root: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    held: dict[str, fx.Node] = field(default_factory=dict)
    bodies: dict[str, fx.GraphModule] = field(default_factory=dict)
    by_hash: dict[str, str] = field(default_factory=dict)
    twins: dict[str, list[_Twin]] = field(default_factory=dict)
    names: Namer = field(default_factory=Namer)

    def __post_init__(self) -> None:
        self.canonical = {alias: name for name, entry in self.flat.state.items() for alias in (name, *entry.aliases)}
        self.output = output_of(self.flat.graph)
        for node, name in self.flat.inputs.items():
            self.values[node] = self.root.placeholder(name)
            set_info(self.values[node], replace(info(node), role="input", path="", source=""))

    def glue(self, nodes: Glue, name: str) -> None:
        """A block of what stands between the user's own."""
        inside = set(nodes)
        outputs = [node for node in nodes if node is self.output or any(user not in inside for user in node.users)]
        self._block(nodes, self._captured(nodes, {}), outputs, "", name)

    def traced(self, region: Region) -> None:
        """A block of the user's that was traced."""
        cell = region.record.cell
        wanted = {inner: activation_name(region.inputs[i], region.record.arguments[i]) for i, inner in sorted(region.parameters.items())}
        wanted.update(self._captured(region.nodes, wanted))
        for i, inner in region.parameters.items():
            self.values[inner] = self.values[region.inputs[i]]
        inside = set(region.nodes)
        outputs = dict.fromkeys(node for node in region.returned if node in inside)
        outputs.update(dict.fromkeys(escapes(region)))
        twin = self._block(region.nodes, wanted, list(outputs), cell.path, class_name(cell.kind))
        for index, node in region.outputs.items():
            self.values[node] = self._value(region.returned[index])
        self.twins.setdefault(region.record.group, []).append(_Twin(*twin, region))

    def folded(self, region: Region) -> None:
        """Call the body of the group's traced calls with this call's inputs and this module's own state."""
        twins = self.twins[region.record.group]
        twin, path = twins[0], region.record.cell.path
        self._check_twins(region)
        index_of = {inner: i for i, inner in twin.region.parameters.items()}
        activations = [self.values[region.inputs[index_of[x]] if x in index_of else x] for x in twin.cut.activations]
        state = []
        for node in twin.cut.state:
            entry = self.flat.state[self.flat.holders[node]]
            relative = relative_name(entry, twin.region.record.cell.path)
            state.append(self.canonical.get(f"{path}.{relative}", entry.name) if relative != entry.name else entry.name)
        results = self._call(twin.body, twin.cut, activations, state, path)
        for index, node in region.outputs.items():
            returned = twin.region.returned[index]
            if returned in results:
                self.values[node] = results[returned]
            elif returned in index_of:
                self.values[node] = self.values[region.inputs[index_of[returned]]]
            else:
                self.values[node] = self._value(returned)

    def _captured(self, nodes: Glue, known: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
        """Values from outside that are read, other than state and those known, with names for them."""
        skipped = {*nodes, *known, *self.flat.holders}
        external = dict.fromkeys(x for node in nodes for x in node.all_input_nodes if x not in skipped)
        return {node: self.flat.inputs.get(node) or activation_name(node) for node in external}

    def _block(self, nodes: Glue, wanted: Mapping[fx.Node, str], outputs: list[fx.Node], path: str, name: str) -> tuple[str, Cut]:
        """Cut a body out of the flat graph, share it with equal ones, and call it."""
        found = cut(nodes, wanted, outputs, self.flat.holders, self.flat.state, path, self.flat.inputs)
        body = self._share(found, name)
        self._call(body, found, [self.values[node] for node in found.activations], [self.flat.holders[node] for node in found.state], path)
        return body, found

    def _value(self, node: fx.Node) -> fx.Node:
        """The root's node for a flat node, which may be a parameter."""
        return self._state(self.flat.holders[node]) if node in self.flat.holders else self.values[node]

    def _check_twins(self, region: Region) -> None:
        first, *rest = self.twins[region.record.group]
        for other in rest:
            captured = [[x for x in twin.cut.activations if x not in twin.region.parameters.values()] for twin in (first, other)]
            if first.body != other.body or captured[0] != captured[1]:
                kind = region.record.cell.kind
                where = region.record.cell.container or "the model"
                reason = f"The blocks {kind} in {where} were traced one by one: they look alike and compute differently."
                raise StartOver(self.marking.shortcuts.without_folding(region.record.group), reason)

    def _share(self, found: Cut, name: str) -> str:
        """The name of the body: an equal one that exists, or a new one."""
        key = body_hash(found.body)
        if key not in self.by_hash:
            self.by_hash[key] = self.names(name)
            self.bodies[self.by_hash[key]] = found.body
        return self.by_hash[key]

    def _state(self, name: str) -> fx.Node:
        if name not in self.held:
            entry = self.flat.state[name]
            node = self.root.create_node("get_attr", STATE + name, name=name.replace(".", "_"))
            set_info(node, Info(entry.value, role="parameter" if entry.kind == "parameter" else "buffer", path=name))
            self.held[name] = node
        return self.held[name]

    def _call(self, body: str, found: Cut, activations: list[fx.Node], state: list[str], path: str) -> dict[fx.Node, fx.Node]:
        """Append the block's root node and a ``getitem`` for each output; returns those, and records them where traced."""
        args = (*activations, *(self._state(name) for name in state))
        node = self.root.create_node("call_module", BODIES + body, args, name=path.replace(".", "_") or body)
        values = tuple(_single(info(x)) for x in found.outputs)
        set_info(node, Info(values, path=path))
        results = {}
        for index, (flat_node, value) in enumerate(zip(found.outputs, values, strict=True)):
            name = "loss" if flat_node is self.output else activation_name(flat_node)
            get = self.root.create_node("call_function", operator.getitem, (node, index), name=name)
            set_info(get, Info(value, path=path))
            results[flat_node] = get
            self.values.setdefault(flat_node, get)
        return results


def _single(found: Info) -> Value:
    assert isinstance(found.value, Value)
    return found.value


def split(flat: Flat, marking: Marking, name: str) -> Program:
    """Build the program; raises ``StartOver`` if a block was folded that must not be."""
    items = read_regions(flat.graph, marking)
    check_chains(flat.graph, items, marking.shortcuts)
    check_folded(items, marking)
    builder = _Builder(flat, marking)
    cells = [item.record.cell for item in items if isinstance(item, Region)]
    glue = GlueNames([cell.path for cell in cells], [cell.container for cell in cells], marking.classes)
    for item in items:
        if isinstance(item, Region):
            (builder.traced if item.record.traced else builder.folded)(item)
            continue
        for piece in glue.pieces(item):
            builder.glue(piece, glue.name(piece, is_first=not builder.bodies, is_last=builder.output in piece))
    builder.root.output(builder.values[builder.output])
    used = {name: entry for name, entry in flat.state.items() if name in builder.held or entry.kind != "constant"}
    root = new_root(builder.root, used, builder.bodies)
    return Program(root, flat.symbols, used, report=list(flat.report), name=name, assumptions=flat.assumptions)

"""``draw``: the root graph of a program, runs of equal blocks collapsed, one block opened on demand."""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import graphviz
from torch import fx

from hgc import records
from hgc.backends.graphviz import body as bodies
from hgc.backends.graphviz import folding, grouping, labels, naming
from hgc.backends.graphviz.render import Drawing
from hgc.errors import HgcError
from hgc.ir.placement import Placement
from hgc.ir.program import BODIES, STATE, Program
from hgc.ir.value import Value, info

GRAPH = {"rankdir": "TB", "nslimit": "2", "nslimit1": "2", "fontname": labels.FONT, "labelloc": "t", "nodesep": "0.3", "ranksep": "0.35"}
NODE = {"shape": "box", "style": "rounded,filled", "fillcolor": "white", "color": "#57606a", "fontname": labels.FONT, "margin": "0.06,0.03"}
EDGE = {"color": "#57606a", "arrowsize": "0.6"}
MANY_NODES = 150
AXIS_WORDS = {"dp": "data parallel (dp)", "tp": "tensor parallel (tp)"}


def draw(program: Program, path: str | Path | None = None, open_body: str | None = None) -> Drawing:
    """Draw a program.

    The picture shows inputs, blocks and loss; equal blocks in a row are one box with a count. ``open_body`` names a body
    whose operators are shown in place of its box. With ``path`` (``.svg``, ``.png``, ``.pdf`` or ``.dot``) the picture is written too;
    without the ``dot`` binary its DOT source is written next to ``path`` and one line printed that says how to get the picture.
    Raises :class:`HgcError` if there is no such body, :class:`ArtifactError` if the file cannot be written.
    """
    if open_body is not None and open_body not in program.bodies:
        raise HgcError(f"the program has no block {open_body!r} to open; {records.suggestion(open_body, program.bodies)}")
    drawing = Drawing(_Picture(program, open_body).source())
    if path is not None:
        written = drawing.save_as(path)
        if written.note:
            print(written.note)
    return drawing


@dataclass(frozen=True)
class _Step:
    """A drawn thing of the root graph: the node's body or operator, and where it stood."""

    node: fx.Node
    key: str
    path: str


class _Picture:
    def __init__(self, program: Program, open_body: str | None) -> None:
        self.program, self.open_body, self.mesh = program, open_body, program.mesh
        self.steps = [_step(node) for node in program.root.graph.nodes if _is_step(node)]
        self.place = {step.node: index for index, step in enumerate(self.steps)}
        self.box: dict[int, int] = {}
        self.opened: tuple[int, list[str], list[str]] | None = None
        self.graph = graphviz.Digraph(graph_attr=GRAPH, node_attr=NODE, edge_attr=EDGE)

    def source(self) -> str:
        items = folding.fold([step.key for step in self.steps], self._joined)
        for item in items:
            for first, covered in folding.leaves(item):
                self.box.update(dict.fromkeys(covered, first))
        for node in self.program.inputs():
            self._add_end(f"in_{node.name}", node.name, node)
        for item in items:
            self._add_item(self.graph, item)
        loss = self.program.output()
        self._add_end("loss", "loss", loss)
        self._add_edges()
        self._add_legend()
        title = f"{self.program.name}  {naming.quantity(self._parameters())} parameters"
        self.graph.attr(label=f"<{labels.Row(title, bold=True)}>", tooltip=labels.plain(self.program.name))
        if len(self.steps) > MANY_NODES and self.open_body is None and len(set(self.box.values())) > MANY_NODES:
            self.graph.attr(splines="polyline")
        return str(self.graph.source)

    def _joined(self, before: int, after: int) -> bool:
        return any(_origin(source) is self.steps[before].node for source in self.steps[after].node.all_input_nodes)

    def _parameters(self) -> int:
        return sum(int(entry.value.numel) for entry in self.program.state.values() if entry.kind == "parameter")

    def _add_item(self, graph: graphviz.Digraph, item: folding.Item) -> None:
        if isinstance(item, int):
            self._add_step(graph, item, [item])
        elif item.unit == (item.unit[0],) and isinstance(item.unit[0], int):
            ((first, covered),) = folding.leaves(item)
            self._add_step(graph, first, covered)
        else:
            with graph.subgraph(name=f"cluster_run{folding.leaves(item)[0][0]}") as cluster:
                cluster.attr(label=f"<{labels.Row(f'× {item.count}', bold=True)}>", labeljust="r", style="rounded,dashed", color=labels.INK)
                for part in item.unit:
                    self._add_item(cluster, part)

    def _add_step(self, graph: graphviz.Digraph, first: int, covered: list[int]) -> None:
        step = self.steps[first]
        every = [self.steps[index] for index in self._all(first)]
        if step.key == self.open_body and self.opened is None:
            self._open(graph, first, step, every, len(covered))
            return
        found = naming.first_value(info(step.node))
        rows = [labels.Row(step.key + (f"  × {len(covered)}" if len(covered) > 1 else ""), bold=True)]
        rows += [labels.Row(words, faint=True) for words in [naming.path_range([other.path for other in every])] if words]
        rows += [labels.Row(words, faint=True) for words in [self._facts(step, len(covered))] if words]
        rows += [labels.Row(labels.shape(found.shape), faint=True)] if found else []
        box = labels.Box(tuple(rows), found.placements if found else (), tuple(self._collectives(step)))
        tooltip = labels.plain(labels.tooltip(found, self.mesh) if found else step.key)
        graph.node(f"step{first}", str(box), peripheries="2" if len(covered) > 1 else "1", tooltip=tooltip)

    def _open(self, graph: graphviz.Digraph, first: int, step: _Step, every: list[_Step], count: int) -> None:
        with graph.subgraph(name=f"cluster_open{first}") as cluster:
            heading = step.key + (f"  × {count}" if count > 1 else "")
            where = naming.path_range([other.path for other in every])
            title = f"{labels.Row(heading, bold=True)} {labels.Row(where, faint=True)}"
            cluster.attr(label=f"<{title}>", style="rounded", color=labels.INK, penwidth="1.5", tooltip=labels.plain(step.path or step.key))
            entries, results = bodies.add_body(cluster, self.program.body(step.key), self.mesh, f"b{first}_")
        self.opened = (first, entries, results)

    def _all(self, first: int) -> list[int]:
        return [index for index, box in self.box.items() if box == first]

    def _facts(self, step: _Step, count: int) -> str:
        """Parameters of one block, or the operators of a block that has few."""
        sizes = [self.program.state[str(node.target).removeprefix(STATE)] for node in step.node.all_input_nodes if node.op == "get_attr"]
        number = sum(int(entry.value.numel) for entry in sizes if entry.kind == "parameter")
        words = [f"{naming.quantity(number)} parameters{' each' if count > 1 else ''}"] if number else []
        words += ["recomputed in backward"] if self._recomputed(step.node) else []
        if step.node.op == "call_module":
            groups = grouping.groups(self.program.body(step.key))
            names = [naming.operator_name(group.last) for group in groups if not naming.is_collective(group.last)]
            words = [", ".join(names), *words] if 0 < len(names) <= 3 else words
        return " · ".join(words)

    def _recomputed(self, node: fx.Node) -> bool:
        """The block, or its attention."""
        if info(node).recompute or node.op != "call_module":
            return info(node).recompute
        inside = self.program.body(str(node.target).removeprefix(BODIES)).graph.nodes
        return any(info(n).recompute for n in inside if "hgc" in n.meta)

    def _collectives(self, step: _Step) -> list[str]:
        """What the block sends in forward: ``all_gather tp × 2``."""
        if step.node.op != "call_module":
            return []
        nodes = self.program.body(step.key).graph.nodes
        counts = Counter(f"{naming.operator_name(node)} {naming.axis_of(node)}" for node in nodes if node.target in naming.MOVES_FORWARD)
        return [f"{name} × {count}" if count > 1 else name for name, count in counts.items()]

    def _add_end(self, name: str, word: str, node: fx.Node) -> None:
        found = naming.first_value(info(node))
        rows = [labels.Row(word, bold=True)] + (
            [labels.Row(f"{labels.shape(found.shape)} {labels.dtype(found)}", faint=True)] if found else []
        )
        box = labels.Box(tuple(rows), found.placements if found else ())
        tooltip = labels.plain(labels.tooltip(found, self.mesh) if found else word)
        self.graph.node(name, str(box), fillcolor=labels.END, color=labels.END, tooltip=tooltip)

    def _add_edges(self) -> None:
        edges: dict[tuple[str, str], list[Value]] = {}
        backward: set[tuple[str, str]] = set()
        for index, step in enumerate(self.steps):
            activations = [source for source in step.node.args if isinstance(source, fx.Node) and source.op != "get_attr"]
            for position, source in enumerate(activations):
                edge = (self._from(source), self._to(index, position))
                origin = _origin(source)
                if origin in self.place and self.box[self.place[origin]] == self.box[index]:
                    continue
                if origin in self.place and self.box[self.place[origin]] > self.box[index]:
                    backward.add(edge)
                edges.setdefault(edge, [])
                edges[edge] += [found for found in [naming.first_value(info(source))] if found]
        edges.setdefault((self._from(self.program.output()), "loss"), [])
        for (start, end), values in edges.items():
            tooltip = "\n".join(dict.fromkeys(labels.tooltip(found, self.mesh) for found in values))
            extra = {"style": "dashed", "constraint": "false"} if (start, end) in backward else {}
            self.graph.edge(start, end, tooltip=labels.plain(tooltip), **extra)

    def _from(self, source: fx.Node) -> str:
        origin = _origin(source)
        if origin.op == "placeholder":
            return f"in_{origin.name}"
        first = self.box[self.place[origin]]
        if self.opened and self.opened[0] == first:
            return self.opened[2][int(source.args[1]) if naming.is_getitem(source) else 0]  # type: ignore[arg-type]
        return f"step{first}"

    def _to(self, index: int, position: int) -> str:
        first = self.box[index]
        if self.opened and self.opened[0] == first:
            return self.opened[1][position]
        return f"step{first}"

    def _add_legend(self) -> None:
        kinds = self._placements()
        mesh = " × ".join(f"{size} {AXIS_WORDS.get(axis, axis)}" for axis, size in self.mesh.items())
        lines = [f"mesh: {mesh}"] if mesh else ["one device"]
        meanings = [f"{symbol} = {found.meaning}" for symbol, found in self.program.symbols.items() if str(symbol) != found.meaning]
        lines += [", ".join(meanings)] if meanings else []
        lines += ["shapes are global; hover for one rank's share"] if mesh else []
        samples = [(labels.COLLECTIVE, labels.COLLECTIVE, "inserted communication")] if self._has(naming.MOVES_FORWARD) else []
        samples += [("white", labels.COLLECTIVE, "communication in the backward pass only")] if self._shows_backward() else []
        self.graph.node("legend", labels.legend("Legend", lines, kinds, samples), shape="plaintext", style="", tooltip="legend")

    def _placements(self) -> set[type[Placement]]:
        graphs = [self.program.root.graph, *(body.graph for body in self.program.bodies.values())]
        values = (naming.first_value(found) for graph in graphs for node in graph.nodes if (found := node.meta.get("hgc")))
        return {type(placement) for found in values if found for _, placement in found.placements}

    def _has(self, targets: frozenset[object]) -> bool:
        graphs: list[fx.Graph] = [self.program.root.graph, *(body.graph for body in self.program.bodies.values())]
        return any(node.target in targets for graph in graphs for node in graph.nodes if node.op == "call_function")

    def _shows_backward(self) -> bool:
        opened = list(self.program.body(self.open_body).graph.nodes) if self.open_body else []
        nodes = [*opened, *(step.node for step in self.steps)]
        return any(node.target in naming.MOVES_BACKWARD for node in nodes if node.op == "call_function")


def _is_step(node: fx.Node) -> bool:
    return node.op == "call_module" or (node.op == "call_function" and node.target is not operator.getitem)


def _step(node: fx.Node) -> _Step:
    if node.op == "call_module":
        return _Step(node, str(node.target).removeprefix(BODIES), info(node).path)
    return _Step(node, naming.operator_name(node), info(node).path)


def _origin(node: fx.Node) -> fx.Node:
    while naming.is_getitem(node):
        node = node.all_input_nodes[0]
    return node

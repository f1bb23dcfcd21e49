"""The operators of one body, as boxes inside the clusters of the user's modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import graphviz
from torch import fx

from hgc.backends.graphviz import grouping, labels, naming
from hgc.backends.graphviz.grouping import Group
from hgc.ir.placement import Placement
from hgc.ir.value import info, value

LONGEST_LIST = 7


def add_body(graph: graphviz.Digraph, body: fx.GraphModule, mesh: Mapping[str, int], prefix: str) -> tuple[list[str], list[str]]:
    """Draw a body into ``graph``; returns the ids of its activation inputs and of its outputs, in order."""
    found = grouping.groups(body)
    ids = {node: f"{prefix}{group.last.name}" for group in found for node in group.nodes}
    entries = [node for node in body.graph.nodes if node.op == "placeholder" and not grouping.is_state(node)]
    for node in entries:
        ids[node] = f"{prefix}{node.name}"
        _add_end(graph, ids[node], node.name, node, mesh)
    _add_cluster(graph, "", found, mesh, prefix)
    for group in found:
        for source in _sources(group):
            graph.edge(ids[source], ids[group.last], tooltip=labels.plain(_edge_tooltip(source, mesh)))
    return [ids[node] for node in entries], _add_outputs(graph, body, ids, mesh, prefix)


def _add_outputs(
    graph: graphviz.Digraph, body: fx.GraphModule, ids: Mapping[fx.Node, str], mesh: Mapping[str, int], prefix: str
) -> list[str]:
    (output,) = (node for node in body.graph.nodes if node.op == "output")
    results = []
    for index, result in enumerate(output.args[0]):
        name = f"{prefix}output{index}"
        _add_end(graph, name, "result" if len(output.args[0]) == 1 else f"result {index}", result, mesh)
        source = grouping.inputs(output)[0] if len(output.args[0]) == 1 else _origin(result)
        if source in ids:
            graph.edge(ids[source], name, tooltip=labels.plain(_edge_tooltip(result, mesh)))
        results.append(name)
    return results


def _origin(node: fx.Node) -> fx.Node:
    while naming.is_getitem(node):
        node = node.all_input_nodes[0]
    return node


def _add_end(graph: graphviz.Digraph, name: str, word: str, node: fx.Node, mesh: Mapping[str, int]) -> None:
    found = naming.first_value(info(node))
    rows = (labels.Row(word, bold=True), *([labels.Row(labels.shape(found.shape), faint=True)] if found else []))
    box = labels.Box(rows, found.placements if found else ())
    tooltip = labels.plain(labels.tooltip(found, mesh) if found else word)
    graph.node(name, str(box), fillcolor=labels.END, color=labels.END, tooltip=tooltip)


def _sources(group: Group) -> list[fx.Node]:
    inside = set(group.nodes)
    found = (source for node in group.nodes for source in grouping.inputs(node))
    return list(dict.fromkeys(source for source in found if source not in inside and not grouping.is_state(source)))


def _add_cluster(graph: graphviz.Digraph, path: str, members: Sequence[Group], mesh: Mapping[str, int], prefix: str) -> None:
    """Boxes of the module at ``path`` and a cluster for each child module that has more than one box."""
    depth = len(path.split(".")) if path else 0
    children: dict[str, list[Group]] = {}
    for group in members:
        parts = group.path.split(".") if group.path else []
        children.setdefault(".".join(parts[: depth + 1]) if len(parts) > depth else path, []).append(group)
    for child, inner in children.items():
        if child == path or len(inner) == 1:
            for group in inner:
                _add_group(graph, group, "" if child == path else group.path[depth and len(path) + 1 :], mesh, prefix)
            continue
        with graph.subgraph(name=labels.plain(f"cluster_{prefix}{child}")) as cluster:
            cluster.attr(label=f"<{labels.Row(_module_name(child))}>", tooltip=labels.plain(child), **labels.MODULE)
            _add_cluster(cluster, child, inner, mesh, prefix)


def _module_name(path: str) -> str:
    """The last word of a path, with its list if it is an index: ``layer.0``."""
    parts = path.split(".")
    return ".".join(parts[-2:]) if parts[-1].isdigit() else parts[-1]


def _add_group(graph: graphviz.Digraph, group: Group, module: str, mesh: Mapping[str, int], prefix: str) -> None:
    last = group.last
    found = naming.first_value(info(last))
    detail = labels.tooltip(found, mesh) if found else ""
    chips = found.placements if found else ()
    if naming.is_collective(last):
        _add_collective(graph, f"{prefix}{last.name}", last, _state_rows(group), chips, detail)
        return
    names = [naming.operator_name(node) for node in group.nodes]
    listed = ", ".join(names) if len(names) <= LONGEST_LIST else f"{', '.join(names[: LONGEST_LIST - 1])}, ... {names[-1]}"
    titled = bool(module) and module != listed
    rows = [labels.Row(module, bold=True), labels.Row(listed)] if titled else [labels.Row(listed, bold=len(names) == 1)]
    rows += [labels.Row(", ".join(words)) for words in [naming.attributes(last)] if words]
    rows += _state_rows(group)
    rows += [labels.Row(labels.shape(found.shape), faint=True)] if found else []
    tooltip = f"{group.path}\n{', '.join(names)}\n{detail}".strip()
    graph.node(f"{prefix}{last.name}", str(labels.Box(tuple(rows), chips)), tooltip=labels.plain(tooltip))


def _add_collective(
    graph: graphviz.Digraph, name: str, node: fx.Node, state: list[labels.Row], chips: tuple[tuple[str, Placement], ...], detail: str
) -> None:
    moves = node.target in naming.MOVES_FORWARD
    ink = "white" if moves else labels.COLLECTIVE
    rows = (
        labels.Row(naming.operator_name(node), bold=True, colour=ink),
        labels.Row(naming.collective_words(node), colour=ink),
        *(labels.Row(row.content.split("  ")[0], colour=ink) for row in state),
    )
    graph.node(
        name,
        str(labels.Box(rows, chips)),
        shape="component",
        style="filled",
        color=labels.COLLECTIVE,
        fillcolor=labels.COLLECTIVE if moves else "white",
        margin="0.02,0",
        penwidth="1.5",
        tooltip=labels.plain(detail),
    )


def _state_rows(group: Group) -> list[labels.Row]:
    """Each parameter a group reads: its name, shape and placements."""
    rows = []
    for node in dict.fromkeys(source for member in group.nodes for source in grouping.inputs(member) if grouping.is_state(source)):
        placed = " ".join(f"{axis} {placement}" for axis, placement in value(node).placements)
        name = info(node).path.split(".")[-1] or node.name
        rows.append(labels.Row(f"{name} {labels.shape(value(node).shape)}{'  ' + placed if placed else ''}", faint=True))
    return rows


def _edge_tooltip(node: fx.Node, mesh: Mapping[str, int]) -> str:
    found = naming.first_value(info(node))
    return f"{node.name}\n{labels.tooltip(found, mesh)}" if found else node.name

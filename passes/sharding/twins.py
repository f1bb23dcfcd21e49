"""Stages alike are lowered once: what was lowered for one is the other's under its own names."""

from __future__ import annotations

from dataclasses import replace

from hgc.ir.program import STATE, Program, new_root
from hgc.ir.value import info, set_info


def as_twin(stage: Program, other: Program, lowered: Program) -> Program:
    """``stage``, lowered as ``other`` was, for stages of one :func:`~hgc.ir.hashing.structure_hash`; the caller verifies it."""
    made = lowered.copy()
    names = dict(zip(other.state, stage.state, strict=True))
    state = {names[name]: replace(stage.state[names[name]], value=entry.value, rows=entry.rows) for name, entry in lowered.state.items()}
    for node, own in zip(made.root.graph.nodes, stage.root.graph.nodes, strict=True):
        if node.op == "get_attr":
            node.target = STATE + names[str(node.target).removeprefix(STATE)]
        elif node.op == "placeholder":
            node.target = own.target
        if node.op != "output":
            set_info(node, replace(info(node), path=info(own).path))
    report = [*stage.report, *(sentence for sentence in lowered.report if sentence not in other.report)]
    root = new_root(made.root.graph, state, made.bodies)
    return replace(made, root=root, state=state, report=report, reference=stage, name=stage.name, results=stage.results)

"""Remove what no block needs: outputs nobody reads, inputs that are not used, blocks without results."""

from __future__ import annotations

import operator
from dataclasses import replace

from torch import fx

from hgc.ir.program import BODIES, Program
from hgc.ir.value import info, set_info


def prune(program: Program) -> None:
    """Shrink bodies and their calls together until nothing is left to remove."""
    while _dead_root_nodes(program) or any(_shrink(program, name) for name in list(program.bodies)):
        pass
    program.root.graph.lint()
    program.root.recompile()


def _dead_root_nodes(program: Program) -> bool:
    removed = False
    for node in reversed(list(program.root.graph.nodes)):
        if node.op in ("call_function", "call_module", "get_attr") and not node.users:
            program.root.graph.erase_node(node)
            removed = True
    return removed


def _shrink(program: Program, name: str) -> bool:
    body = program.body(name)
    calls = [node for node in program.root.graph.nodes if node.op == "call_module" and node.target == BODIES + name]
    (output,) = (n for n in body.graph.nodes if n.op == "output")
    results: list[fx.Node] = list(output.args[0])
    used = [i for i in range(len(results)) if any(user.args[1] == i for call in calls for user in call.users)]
    if len(used) < len(results):
        output.args = (tuple(results[i] for i in used),)
        for call in calls:
            _renumber(call, {old: new for new, old in enumerate(used)})
    for node in reversed(list(body.graph.nodes)):
        if node.op == "call_function" and not node.users:
            body.graph.erase_node(node)
    placeholders = [n for n in body.graph.nodes if n.op == "placeholder"]
    kept = [i for i, placeholder in enumerate(placeholders) if placeholder.users]
    for placeholder in placeholders:
        if not placeholder.users:
            body.graph.erase_node(placeholder)
    for call in calls:
        call.args = tuple(call.args[i] for i in kept)
    body.recompile()
    return len(used) < len(results) or len(kept) < len(placeholders)


def _renumber(call: fx.Node, new_index: dict[int, int]) -> None:
    for user in list(call.users):
        assert user.target is operator.getitem
        old = user.args[1]
        assert isinstance(old, int)
        user.args = (call, new_index[old])
    values = info(call).value
    assert isinstance(values, tuple)
    set_info(call, replace(info(call), value=tuple(values[old] for old in new_index)))

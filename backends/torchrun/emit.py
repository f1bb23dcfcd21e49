"""``emit``: the source of ``program.py``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import fx

from hgc.backends.torchrun.body import BodyPrinter
from hgc.backends.torchrun.declarations import Declaration, data_axes, declaration_lines, declare
from hgc.backends.torchrun.header import docstring, import_lines, plan_lines
from hgc.backends.torchrun.layout import WIDTH, indent
from hgc.backends.torchrun.model import init_lines, make_forward
from hgc.backends.torchrun.names import MODULE_NAMES, Scope, comment
from hgc.backends.torchrun.root import Call, read_calls, used_outputs
from hgc.backends.torchrun.sizes import Symbols
from hgc.errors import ArtifactError
from hgc.ir.program import STATE, Program, State
from hgc.ir.value import info
from hgc.plan import Plan


def emit(program: Program, plan: Plan) -> str:
    """The source of ``program.py`` for a program that is lowered as ``plan`` says; without axes it is a single-device program.

    The same program and plan give the same text. Its length does not depend on how often a block repeats. Raises
    :class:`~hgc.errors.ArtifactError` for an operator that has no source form (a Python function from outside hgc), and for a plan of
    another number of ranks.
    """
    ranks = math.prod(program.mesh.values())
    if ranks != plan.devices:
        raise ArtifactError(
            f"the program is lowered for {ranks} ranks, the plan is for {plan.devices}; distribute the traced program by this plan"
        )
    symbols = Symbols.of(program)
    calls = read_calls(program)
    data = data_axes(program.state, program.mesh)
    scope = Scope(MODULE_NAMES)
    classes = {name: scope.take(name, "Block") for name in program.bodies}
    rest: list[str] = [*plan_lines(program, plan, symbols)]
    used = used_outputs(program)
    for name in classes:
        own = [call for call in calls if call.block.body == name]
        rest += ["", "", *class_lines([(program, call) for call in own], classes[name], used[name], symbols)]
    unused = unused_state(program)
    unused_class = scope.take("Unused") if unused else ""
    if unused:
        rest += ["", "", *unused_lines(unused_class, unused, data)]
    rest += ["", "", *_model(program, calls, classes, unused_class)]
    rest += ["", "", 'if __name__ == "__main__":', "    rt.main(Model, PLAN)", ""]
    text = "\n".join(rest)
    return "\n".join([*docstring(program, plan, symbols), "", *import_lines(text), "", *rest])


def class_lines(calls: Sequence[tuple[Program, Call]], name: str, used: Sequence[int], symbols: Symbols) -> Iterator[str]:
    """The class of a body for all its calls, each with the program (one of a pipeline's stages) that it is in."""
    program, first = calls[0]
    graph = program.body(first.block.body).graph
    yield _with_comment(f"class {name}(rt.Block):", _places([call for _, call in calls]))
    declarations = _declarations(calls, graph)
    if declarations:
        yield from indent(["def __init__(self) -> None:", "    super().__init__()"])
        yield from indent(declaration_lines(declarations), 2)
        yield ""
    yield from indent(BodyPrinter(graph, used, symbols, bool(first.block.path)).forward().lines)


def _with_comment(code: str, remark: str) -> str:
    room = WIDTH - len(code) - 4
    if not remark or room < 20:
        return code
    return f"{code}  # {remark if len(remark) <= room else remark[: room - 4] + ' ...'}"


def _places(calls: Sequence[Call]) -> str:
    """``model.layers.0 ... 3``: where the blocks of a class stand in the user's model."""
    paths = list(dict.fromkeys(call.block.path for call in calls if call.block.path))
    if not paths:
        return ""
    if len(paths) == 1:
        return comment(paths[0]) + (f", called {len(calls)} times" if len(calls) > 1 else "")
    if len(paths) == 2:
        return comment(", ".join(paths))
    stems = {path.rpartition(".")[0] for path in paths}
    indices = [path.rpartition(".")[2] for path in paths]
    if len(stems) == 1 and all(i.isdigit() for i in indices) and int(indices[-1]) - int(indices[0]) == len(indices) - 1:
        return comment(f"{paths[0]} ... {indices[-1]}")
    return comment(f"{len(paths)} places: {', '.join(paths[:3])}, ...")


def _declarations(calls: Sequence[tuple[Program, Call]], graph: fx.Graph) -> list[Declaration]:
    """The state of a block; every block of the class must declare the same."""
    found: list[Declaration] = []
    for program, call in calls:
        own = declared_state(program, call, graph)
        found = found or own
        if own != found:
            differing = next(a.name for a, b in zip(own, found, strict=True) if a != b)
            raise ArtifactError(
                f"blocks {calls[0][1].block.path!r} and {call.block.path!r} share a class but keep {differing!r} in different ways"
            )
    return found


def declared_state(program: Program, call: Call, graph: fx.Graph) -> list[Declaration]:
    """What one block declares."""
    data = data_axes(program.state, program.mesh)
    found: list[Declaration] = []
    for node, given in zip((n for n in graph.nodes if n.op == "placeholder"), call.block.node.args, strict=True):
        assert isinstance(given, fx.Node)
        if info(node).role != "input":
            entry = program.state[str(given.target).removeprefix(STATE)]
            found.append(declare(_declared_name(call, info(node).path, entry), entry, data))
    return found


def _declared_name(call: Call, relative: str, entry: State) -> str:
    """The name inside the block; with a dot in front a full name, for what a block reads from outside itself."""
    full = f"{call.block.path}.{relative}" if call.block.path else relative
    if full in (entry.name, *entry.aliases):
        return relative
    if relative in (entry.name, *entry.aliases):
        return f".{relative}"
    raise ArtifactError(f"block {call.block.path!r} reads {entry.name!r} under the name {full!r}, which the model does not know")


def unused_state(program: Program) -> dict[str, State]:
    """State that no block reads; checkpoints hold it all the same."""
    read = {str(node.target).removeprefix(STATE) for node in program.root.graph.nodes if node.op == "get_attr"}
    return {name: entry for name, entry in program.state.items() if name not in read and entry.persistent and entry.kind != "constant"}


def unused_lines(name: str, unused: dict[str, State], data: Sequence[str]) -> Iterator[str]:
    yield f"class {name}(rt.Block):  # what the loss does not depend on, kept for checkpoints"
    yield from indent(["def __init__(self) -> None:", "    super().__init__()"])
    yield from indent(declaration_lines([declare(entry.name, entry, data) for entry in unused.values()]), 2)


def _model(program: Program, calls: Sequence[Call], classes: dict[str, str], unused: str) -> Iterator[str]:
    yield "class Model(rt.Model):"
    yield from indent(["def __init__(self) -> None:", "    super().__init__()"])
    lines = list(init_lines(calls, classes))
    attributes = {call.group.attribute for call in calls}
    if unused:
        attribute = Scope(attributes).take("unused")
        lines.append(f"self.{attribute} = {unused}()")
    yield from indent(lines, 2)
    yield ""
    yield from indent(make_forward(program, calls))

"""One block body as a class: declarations, and a ``forward`` that reads as if written by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from hgc.backends.torchrun.expressions import Expression
from hgc.backends.torchrun.layout import WIDTH, Line, aligned, indent, wrapped
from hgc.backends.torchrun.names import MODULE_NAMES, Scope, comment, identifier
from hgc.backends.torchrun.naming import NAMED_BY_MODULE, Names, stem
from hgc.backends.torchrun.operation import Operation
from hgc.backends.torchrun.operators import print_operation
from hgc.backends.torchrun.sections import Sections
from hgc.backends.torchrun.sizes import SizeNames, Symbols
from hgc.backends.torchrun.statements import Layout, Statement, lay_out
from hgc.ir.placement import Invariant, Partial, Placement
from hgc.ir.printing import is_collective
from hgc.ir.rules.core import named_arguments
from hgc.ir.value import Info, Value, info, is_size
from hgc.runtime.modules import access

ROOM = WIDTH - 8
"""Characters of a statement inside a method."""


@dataclass(frozen=True)
class BodySource:
    """The ``forward`` of a class, and how many results it returns."""

    lines: tuple[str, ...]
    returns: int


class BodyPrinter:
    """Prints one body. ``used`` are the positions of its outputs that some caller uses; only these are computed and returned."""

    def __init__(self, graph: fx.Graph, used: Sequence[int], symbols: Symbols, has_path: bool) -> None:
        self.graph, self.symbols = graph, symbols
        (output,) = (n for n in graph.nodes if n.op == "output")
        results = output.args[0]
        assert isinstance(results, tuple | list)
        self.outputs = [results[i] for i in used]
        self.inputs = [n for n in graph.nodes if n.op == "placeholder" and info(n).role == "input"]
        self.base = Names(graph)
        self.has_path = has_path
        self.layout: Layout = lay_out(graph, self.outputs, stem, self._length)
        self.variables: dict[fx.Node, str] = {}
        self.scope = Scope(MODULE_NAMES)
        self.sizes = SizeNames(symbols, self.scope, self.inputs)

    # -- expressions ------------------------------------------------------------------------------------------------------------------

    def _length(self, node: fx.Node, inlined: set[fx.Node]) -> int:
        """Length of ``name = source`` under provisional names."""

        def operand(x: fx.Node) -> Expression:
            if x in inlined:
                return print_operation(Operation(x, operand, "x.device"))
            if x.op == "placeholder" and info(x).role != "input":
                return Expression(f"self{access(info(x).path)}")
            return Expression("S") if is_size(x) else Expression(identifier(self.base(x)))

        return len(identifier(self.base(node))) + 3 + len(print_operation(Operation(node, operand, "x.device")).text)

    def _operand(self, node: fx.Node) -> Expression:
        if is_size(node):
            return self.sizes.expression(node)
        if node.op == "placeholder" and info(node).role != "input":
            return Expression(f"self{access(info(node).path)}")
        if node in self.layout.inlined:
            return self._source(node)
        return Expression(self.variables[node])

    def _source(self, node: fx.Node) -> Expression:
        return print_operation(Operation(node, self._operand, self._device()))

    def _device(self) -> str:
        """Source for the device of this rank: that of a tensor in scope."""
        if self.inputs:
            return f"{self.variables[self.inputs[0]]}.device"
        states = [n for n in self.graph.nodes if n.op == "placeholder"]
        return f"self{access(info(states[0]).path)}.device" if states else "torch.get_default_device()"

    # -- variables --------------------------------------------------------------------------------------------------------------------

    def _last_uses(self) -> dict[fx.Node, int]:
        """Value -> the statement that reads it last; what is returned is read behind the last statement."""
        last: dict[fx.Node, int] = {}

        def read(node: fx.Node, position: int) -> None:
            for x in node.all_input_nodes:
                if x in self.layout.inlined:
                    read(x, position)
                elif not is_size(x):
                    last[x] = position

        for position, statement in enumerate(self.layout.statements):
            read(statement.node, position)
        for node in self.outputs:
            last[node] = len(self.layout.statements)
        return last

    def _take(self, node: fx.Node) -> str:
        return self.scope.take(self.base(node))

    def forward(self) -> BodySource:
        """The method's lines, without indentation."""
        for node in self.inputs:
            self.variables[node] = self._take(node)
        first_names = dict(self.variables)
        self._reserve_sizes()
        last = self._last_uses()
        holders = {self.variables[n]: n for n in self.inputs if n in last}
        sections = Sections(self.has_path, [self._path(s.node) for s in self.layout.statements])
        blocks: list[list[Line]] = [[]]
        for position, statement in enumerate(self.layout.statements):
            source = self._source(statement.node).text
            for name, holder in list(holders.items()):
                if last.get(holder, -1) <= position:
                    self.scope.release(name)
                    del holders[name]
            targets = []
            for result in statement.results:
                if result is None or (result not in last and len(statement.results) > 1):
                    targets.append("_")
                    continue
                self.variables[result] = self._take(result)
                targets.append(self.variables[result])
                if result in last:
                    holders[self.variables[result]] = result
                else:
                    self.scope.release(self.variables[result])
            heading = sections.heading(position)
            if heading is not None:
                blocks.append([Line(f"# {comment(heading)}")] if heading else [])
            blocks[-1].append(Line(_assignment(targets, source), self._comment(statement)))
        return BodySource(tuple(self._method(blocks, first_names)), len(self.outputs))

    def _reserve_sizes(self) -> None:
        """Give size variables their names before any value gets one."""
        for statement in self.layout.statements:
            self._visit_sizes(statement.node)

    def _visit_sizes(self, node: fx.Node) -> None:
        for x in node.all_input_nodes:
            if is_size(x):
                self.sizes.expression(x)
            elif x in self.layout.inlined:
                self._visit_sizes(x)

    # -- text -------------------------------------------------------------------------------------------------------------------------

    def _method(self, blocks: list[list[Line]], inputs: dict[fx.Node, str]) -> Iterator[str]:
        parameters = ["self", *(f"{name}: Tensor" for name in inputs.values())]
        returned = f"tuple[{', '.join(['Tensor'] * len(self.outputs))}]" if len(self.outputs) != 1 else "Tensor"
        yield from wrapped_definition(f"def forward({', '.join(parameters)})", returned)
        body = [f"# {line}" for line in self._inputs_comment(inputs)]
        body += list(self.sizes.lines(inputs))
        yield from indent(body)
        for number, lines in enumerate(block for block in blocks if block):
            if number or body:
                yield ""
            yield from indent(aligned(lines, ROOM))
        results = ", ".join(self._operand(n).text for n in self.outputs)
        yield from indent(wrapped(f"return {results}", ROOM))

    def _inputs_comment(self, inputs: dict[fx.Node, str]) -> Iterator[str]:
        """Shapes and placements of the inputs, those that are alike together."""
        alike: dict[str, list[str]] = {}
        for node, name in inputs.items():
            value = _single(info(node))
            placed = _placed(value)
            alike.setdefault(self.symbols.local_shape(value) + (f"  {placed}" if placed else ""), []).append(name)
        yield from (f"{', '.join(names)}: {text}" for text, names in alike.items())

    def _comment(self, statement: Statement) -> str:
        values = [info(r).value if r is not None else None for r in statement.results]
        shapes = list(dict.fromkeys(self.symbols.local_shape(v, self.sizes.composite) for v in values if isinstance(v, Value)))
        text = ", ".join(shapes)
        if len(statement.results) > 1 and len(shapes) == 1:
            text = f"{text} each"
        partial = [axis for v in values if isinstance(v, Value) for axis, p in v.placements if isinstance(p, Partial)]
        summand = "".join(f"  {comment(axis)}: P" for axis in dict.fromkeys(partial))
        return text + (self._transition(statement.node) or summand)

    def _path(self, node: fx.Node) -> str:
        """The module a statement belongs to: that of the operator with weights inside it, if there is one."""
        pending, own = [node], info(node).path
        while pending:
            x = pending.pop()
            if stem(x) in NAMED_BY_MODULE and info(x).path:
                return info(x).path
            pending += [y for y in x.all_input_nodes if y in self.layout.inlined]
        states = {info(x).path for x in node.all_input_nodes if info(x).role not in ("", "input")}
        return own.rpartition(".")[0] if own in states else own

    def _transition(self, node: fx.Node) -> str:
        if not is_collective(node):
            return ""
        axis = named_arguments(node)["axis"]
        before, after = _placement(node.all_input_nodes[0], axis), _placement(node, axis)
        return f"  {comment(axis)}: {before} -> {after}" if before is not None and after is not None else ""


def _assignment(targets: Sequence[str], source: str) -> str:
    return f"{', '.join(targets)} = {source}" if any(t != "_" for t in targets) else source


def _placed(value: Value) -> str:
    """Where a value lives on each axis; nothing if it is alike everywhere."""
    if all(isinstance(placement, Invariant) for _, placement in value.placements):
        return ""
    return ", ".join(f"{comment(axis)}: {placement}" for axis, placement in value.placements)


def _placement(node: fx.Node, axis: str) -> Placement | None:
    return dict(_single(info(node)).placements).get(axis)


def _single(found: Info) -> Value:
    assert isinstance(found.value, Value)
    return found.value


def wrapped_definition(head: str, returned: str) -> list[str]:
    """A ``def`` line of a method, split like a call if it is too long."""
    tail = f" -> {returned}:"
    if len(head) + len(tail) <= ROOM + 4:
        return [head + tail]
    lines = wrapped(head, ROOM + 4 - len(tail))
    return [*lines[:-1], lines[-1] + tail]

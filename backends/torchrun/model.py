"""The ``Model`` class: blocks in ``__init__``, and a ``forward`` that calls them, in loops where they repeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from hgc.backends.torchrun.body import ROOM, wrapped_definition
from hgc.backends.torchrun.layout import indent, wrapped
from hgc.backends.torchrun.loops import Loop, Slot, find_loops
from hgc.backends.torchrun.names import MODULE_NAMES, Scope, identifier, quote
from hgc.backends.torchrun.naming import Names
from hgc.backends.torchrun.root import Call, Group, class_list
from hgc.ir.program import RECEIVED, Program
from hgc.ir.value import info


def init_lines(calls: Sequence[Call], classes: Mapping[str, str], firsts: Mapping[Group, str] | None = None) -> Iterator[str]:
    """``self.layers = rt.blocks(...)`` for each attribute, in order of first use; ``firsts``: source for where a list starts."""
    for group in dict.fromkeys(call.group for call in calls):
        if group.is_list:
            first = (firsts or {}).get(group, str(group.first or ""))
            made = f"rt.blocks({quote(group.template)}, {class_list(group.bodies, classes)}{f', first={first}' if first else ''})"
        elif group.template:
            made = f"rt.block({quote(group.template)}, {classes[group.bodies[0]]})"
        else:
            made = f"{classes[group.bodies[0]]}()"
        yield from wrapped(f"self.{group.attribute} = {made}", ROOM)


@dataclass
class ForwardPrinter:
    """Prints ``Model.forward``; a variable is reused as soon as nothing reads its value any more."""

    program: Program
    items: Sequence[Call | Loop]
    scope: Scope = field(default_factory=lambda: Scope(MODULE_NAMES | {"i", "range"}))
    variables: dict[fx.Node, str] = field(default_factory=dict)
    last: dict[fx.Node, int] = field(default_factory=dict)

    def lines(self) -> list[str]:
        inputs = self.program.inputs()
        self._find_last_uses()
        head = self._definition(inputs)
        body: list[str] = []
        for position, item in enumerate(self.items):
            body += self._loop(item, position) if isinstance(item, Loop) else self._call(item, position)
        result = ", ".join(self.variables[node] for node in self.program.outputs())
        if body and body[-1].startswith(f"{result} = "):
            return [*head, *indent([*body[:-1], f"return {body[-1].removeprefix(f'{result} = ')}"])]
        return [*head, *indent(body), f"    return {result}"]

    def _definition(self, inputs: Sequence[fx.Node]) -> list[str]:
        """The inputs arrive by the names they have in a batch; what cannot be a parameter's name is unpacked from a dict."""
        named = parameter_names(self.program)
        given = [named[node] for node in inputs]
        if all(name.isidentifier() and identifier(name) == name and self.scope.is_free(name) for name in given):
            for node, name in zip(inputs, given, strict=True):
                self.variables[node] = self.scope.take(name)
            count = len(self.program.outputs())
            returned = f"tuple[{', '.join(['Tensor'] * count)}]" if count > 1 else "Tensor"
            return wrapped_definition(f"def forward({', '.join(['self', *(f'{name}: Tensor' for name in given)])})", returned)
        batch = self.scope.take("batch")
        unpacked = []
        for node, name in zip(inputs, given, strict=True):
            self.variables[node] = self.scope.take(name)
            unpacked.append(f"    {self.variables[node]} = {batch}[{quote(name)}]")
        return [f"def forward(self, **{batch}: Tensor) -> Tensor:", *unpacked]

    # -- names ------------------------------------------------------------------------------------------------------------------------

    def _find_last_uses(self) -> None:
        for position, item in enumerate(self.items):
            for call in item.body if isinstance(item, Loop) else [item]:
                for node in call.arguments:
                    self.last[node] = position
        self.last.update(dict.fromkeys(self.program.outputs(), len(self.items)))

    def _base(self, node: fx.Node) -> str:
        return base_name(self.program, node)

    def _release(self, position: int) -> None:
        """Free the names of values that nothing behind ``position`` reads."""
        for node, name in self.variables.items():
            holder = next((n for n, held in reversed(self.variables.items()) if held == name), None)
            if holder is node and self.last.get(node, -1) <= position:
                self.scope.release(name)

    def _assign(self, call: Call, source: str, names: Sequence[str | None]) -> str:
        targets = [name or "_" for name in names]
        return f"{', '.join(targets)} = {source}" if targets else source

    # -- statements -------------------------------------------------------------------------------------------------------------------

    def _call(self, call: Call, position: int) -> list[str]:
        target = f"self.{call.group.attribute}" + (f"[{call.index}]" if call.index is not None else "")
        source = _invoke(call, target, [self.variables[a] for a in call.arguments])
        self._release(position)
        names: list[str | None] = []
        for result in call.results:
            names.append(None if result is None else self.scope.take(self._base(result)))
            if result is not None:
                self._hold(result, names[-1] or "")
        return wrapped(self._assign(call, source, names), ROOM)

    def _hold(self, node: fx.Node, name: str) -> None:
        self.variables.pop(node, None)
        self.variables[node] = name

    def _loop(self, loop: Loop, position: int) -> list[str]:
        chains = self._chains(loop, position)
        before = [f"{chain.variable} = {self.variables[chain.start]}" for chain in chains if chain.variable != self.variables[chain.start]]
        counter = self.scope.take(_singular(loop.body[0].group), "block")
        header, targets = _header(loop, counter)
        body, names = self._loop_body(loop, position, targets, chains)
        moved = [(c.variable, names[c.slot]) for c in chains if names[c.slot] != c.variable]
        after = [f"{', '.join(to for to, _ in moved)} = {', '.join(source for _, source in moved)}"] if moved else []
        self.scope.release(counter)
        self._release(position)
        for chain in chains:
            self.scope.release(chain.variable)
        finals = _slots(loop.last)
        for slot, name in names.items():
            if slot in finals and self.last.get(finals[slot], -1) > position:
                self._hold(finals[slot], name)
                self.scope.hold(name)
        return [*before, header, *indent([*body, *after])]

    def _chains(self, loop: Loop, position: int) -> list[_Chain]:
        """The variables that go around the loop."""
        shared = {a for i, call in enumerate(loop.body) for j, a in enumerate(call.arguments) if (i, j) not in loop.carried}
        chains: list[_Chain] = []
        taken: set[str] = set()
        for (i, j), slot in loop.carried.items():
            start = loop.body[i].arguments[j]
            if any(chain.start is start and chain.slot == slot for chain in chains):
                continue
            variable = self.variables[start]
            if self.last[start] > position or start in shared or variable in taken:
                variable = self.scope.take(self._base(loop.body[slot[0]].results[slot[1]] or start))
            taken.add(variable)
            read = max(a for (a, b), s in loop.carried.items() if s == slot and loop.body[a].arguments[b] is start)
            chains.append(_Chain(start, slot, variable, read))
        return chains

    def _loop_body(self, loop: Loop, position: int, targets: Sequence[str], chains: Sequence[_Chain]) -> tuple[list[str], dict[Slot, str]]:
        """Statements of the body, and the variable of each result when the body ends (or when it is read last)."""
        own = {node: slot for slot, node in _slots(loop.body).items()}
        outlives = {slot for slot, node in _slots(loop.last).items() if self.last.get(node, -1) > position} | {c.slot for c in chains}
        last_read = {own[a]: i for i, call in enumerate(loop.body) for a in call.arguments if a in own}
        names: dict[Slot, str] = {}
        lines: list[str] = []
        for number, call in enumerate(loop.body):
            arguments = []
            for j, node in enumerate(call.arguments):
                slot = loop.carried.get((number, j))
                chain = next((c for c in chains if c.start is node and c.slot == slot), None)
                arguments.append(chain.variable if chain else names[own[node]] if node in own else self.variables[node])
            for variable in [c.variable for c in chains if c.last_read == number]:
                self.scope.release(variable)
            for slot in [s for s, i in last_read.items() if i == number and s not in outlives]:
                self.scope.release(names[slot])
            results: list[str | None] = []
            for j, result in enumerate(call.results):
                results.append(None if result is None else self._result_name(result, (number, j), chains))
                if result is not None:
                    names[number, j] = results[-1] or ""
                    if (number, j) not in outlives and (number, j) not in last_read:
                        self.scope.release(names[number, j])
            lines += wrapped(self._assign(call, _invoke(call, targets[number], arguments), results), ROOM - 4)
        for slot in outlives & names.keys():
            self.scope.release(names[slot])
        return lines, names

    def _result_name(self, result: fx.Node, slot: Slot, chains: Sequence[_Chain]) -> str:
        """The variable that carries the result into the next repetition, if nothing else needs it now."""
        for chain in chains:
            if chain.slot == slot and self.scope.is_free(chain.variable):
                self.scope.hold(chain.variable)
                return chain.variable
        return self.scope.take(self._base(result))


@dataclass(frozen=True)
class _Chain:
    """``variable`` enters the loop with the value of ``start`` and is the result ``slot`` of each repetition in the next.

    Call number ``last_read`` of the body is the last that reads the old value.
    """

    start: fx.Node
    slot: Slot
    variable: str
    last_read: int


def _invoke(call: Call, target: str, arguments: Sequence[str]) -> str:
    return f"rt.recompute({', '.join([target, *arguments])})" if call.recompute else f"{target}({', '.join(arguments)})"


def _slots(calls: Sequence[Call]) -> dict[Slot, fx.Node]:
    return {(i, j): node for i, call in enumerate(calls) for j, node in enumerate(call.results) if node is not None}


def _header(loop: Loop, variable: str) -> tuple[str, list[str]]:
    """The ``for`` line, and how each call of the body reaches its block; ``variable`` is free for it."""
    targets = [f"self.{call.group.attribute}" for call in loop.body]
    if all(call.index is None for call in loop.body):
        return f"for _ in range({loop.count}):", targets
    if len(loop.body) == 1 and loop.steps[0] == 1:
        (call,) = loop.body
        return f"for {variable} in {targets[0]}{_slice(call, loop.count)}:", [variable]
    first = next(call.index for call in loop.body if call.index is not None)
    moving = {step for step, call in zip(loop.steps, loop.body, strict=True) if call.index is not None}
    if len(moving) == 1 and min(moving) > 0:
        (step,) = moving
        bounds = [first, first + step * loop.count, step] if step != 1 else [first, first + loop.count] if first else [loop.count]
        header = f"for i in range({', '.join(map(str, bounds))}):"
        return header, [_indexed(t, call, lambda n: _plus("i", n - first)) for t, call in zip(targets, loop.body, strict=True)]
    header = f"for i in range({loop.count}):"
    indexed = zip(targets, loop.body, loop.steps, strict=True)
    return header, [_indexed(t, call, lambda n, s=step: _plus(_times(s), n)) for t, call, step in indexed]


def _indexed(target: str, call: Call, text: object) -> str:
    assert callable(text)
    return target if call.index is None else f"{target}[{text(call.index)}]"


def _times(step: int) -> str:
    return "i" if step == 1 else f"{step} * i" if step else ""


def _plus(text: str, number: int) -> str:
    if not text:
        return str(number)
    return text if number == 0 else f"{text} + {number}" if number > 0 else f"{text} - {-number}"


def _slice(call: Call, count: int) -> str:
    start, stop, whole = call.index or 0, (call.index or 0) + count, len(call.group.bodies)
    if (start, stop) == (0, whole):
        return ""
    return f"[{start or ''}:{stop if stop != whole else ''}]"


def _singular(group: Group) -> str:
    """``layers`` -> ``layer``."""
    word = next((part for part in reversed(group.template.split(".")) if part != "{}" and not part.isdigit()), "block")
    if len(word) > 3 and word.endswith("s") and not word.endswith("ss"):
        return word[:-1]
    return word if word in ("layer", "block", "stage") else "block"


def make_forward(program: Program, calls: Sequence[Call]) -> list[str]:
    """Lines of ``Model.forward``, without indentation."""
    return ForwardPrinter(program, find_loops(calls)).lines()


def base_name(program: Program, node: fx.Node) -> str:
    """What the first block that reads a value calls it; of what a stage hands on, what the block that makes it calls it."""
    for user in node.users:
        if user.op == "call_module":
            placeholders = [n for n in _graph(program, user).nodes if n.op == "placeholder"]
            return str(placeholders[list(user.args).index(node)].name)
    if program.results and node.op == "call_function":
        call, index = node.args
        assert isinstance(call, fx.Node)
        assert isinstance(index, int)
        graph = _graph(program, call)
        (output,) = (n for n in graph.nodes if n.op == "output")
        return Names(graph)(output.args[0][index])
    return "loss"


def _graph(program: Program, call: fx.Node) -> fx.Graph:
    return program.body(str(call.target).removeprefix("bodies.")).graph


def parameter_names(program: Program) -> dict[fx.Node, str]:
    """Names under which ``forward`` takes the root's placeholders: those of the batch; what a stage receives is called as in its blocks."""
    found = {node: str(node.target) for node in program.inputs() if info(node).role != RECEIVED}
    scope = Scope(found.values())
    for node in program.inputs():
        if node not in found:
            found[node] = scope.take(base_name(program, node), "x")
    return found

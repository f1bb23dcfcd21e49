"""The verifier: refuses a program that is not provably the distributed form of its reference.

Checks, in this order: every value carries a placement on every lowered axis; every placement follows from the rules; gradient kinds
agree on every edge; block borders agree; size arguments equal local shapes; dropping hgc's operators gives the reference graph back.
"""

from __future__ import annotations

import operator
from typing import Any

import sympy
from torch import fx

from hgc.errors import ShardingError, VerifyError
from hgc.ir.derive import as_value, derive, found_placements, name_of
from hgc.ir.input_sizes import evaluate
from hgc.ir.meaning import check_meaning
from hgc.ir.placement import Invariant, Partial, Placement
from hgc.ir.program import BODIES, STATE, Program
from hgc.ir.rules import make_call
from hgc.ir.rules.core import TO_THE_END, named_arguments, updated_arguments
from hgc.ir.sizes import SHAPE_ARGUMENT, SLICE, SPLITS, SYM_SIZE, split_dim
from hgc.ir.value import Value, info, is_size


def planning_hints(program: Program, ranks: int) -> dict[sympy.Symbol, int]:
    """A number for each size symbol that every axis of a mesh of ``ranks`` devices divides, and that nothing else is likely to equal."""
    primes = (101, 103, 107, 109, 113, 127, 131, 137, 139, 149)
    even = 1 if ranks % 2 == 0 else 2  # a zigzag order cuts in two for each rank
    return {symbol: even * ranks * ranks * primes[i % len(primes)] for i, symbol in enumerate(program.symbols)}


def verify(program: Program) -> None:
    """Raise :class:`~hgc.errors.VerifyError` naming node, axis, expected and found, or return None."""
    ranks = 1
    for size in program.mesh.values():
        ranks *= size
    hints = planning_hints(program, ranks)
    for name, body in program.bodies.items():
        _verify_body(name, body, program.mesh, hints)
    _verify_root(program)
    if program.reference is not None:
        check_meaning(program, program.reference)


def _verify_body(name: str, body: fx.GraphModule, mesh: dict[str, int], hints: dict[sympy.Symbol, int]) -> None:
    for node in body.graph.nodes:
        if node.op == "output":
            continue
        if "hgc" not in node.meta:
            raise VerifyError(
                f"node {node.name!r} of block {name} has no hgc information; a pass that inserts nodes must set it (hgc.ir.value.set_info)"
            )
        if is_size(node):
            _check_size(name, node, mesh, hints)
            continue
        _check_axes(name, node, mesh)
        if node.op == "call_function":
            for axis in mesh:
                _check_placement(name, node, axis, mesh, hints)
            _check_shape_argument(name, node, mesh, hints)
            for updated in updated_arguments(node):
                if updated.op != "placeholder":
                    raise VerifyError(f"block {name}: {name_of(node)} updates {updated.name!r}, which is a copy: the update would be lost")


def _values(node: fx.Node) -> tuple[Value, ...]:
    value = info(node).value
    if value is None:
        return ()
    return value if isinstance(value, tuple) else (value,)


def _check_axes(name: str, node: fx.Node, mesh: dict[str, int]) -> None:
    for value in _values(node):
        found = [axis for axis, _ in value.placements]
        if found != list(mesh):
            raise VerifyError(f"node {node.name!r} of block {name} is placed on axes {found}, expected {list(mesh)}")


def _check_placement(name: str, node: fx.Node, axis: str, mesh: dict[str, int], hints: dict[sympy.Symbol, int]) -> None:
    recorded = tuple(value.on(axis) for value in _values(node))
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        derived: tuple[Placement, ...] = (_values(source)[index].on(axis),)
    else:
        call = make_call(node, axis, mesh, hints, found_placements(node, axis))
        try:
            derived = derive(node, call, recorded)
        except ShardingError as error:
            raise VerifyError(f"block {name}: {error}") from None
    if derived != recorded:
        raise VerifyError(
            f"block {name}: {name_of(node)} is recorded as {_text(recorded)} on axis {axis!r}, but its inputs make it {_text(derived)}"
        )


def _text(placements: tuple[Placement, ...]) -> str:
    return ", ".join(map(str, placements))


def _local(value: Value, mesh: dict[str, int]) -> tuple[Any, ...]:
    return value.local_shape(mesh)


def _check_size(name: str, node: fx.Node, mesh: dict[str, int], hints: dict[sympy.Symbol, int]) -> None:
    """A size node must compute what it claims, for two choices of all symbols."""
    known = info(node).size
    assert known is not None
    for numbers in _choices(hints):
        claimed, computed = _number(known, numbers), _size_of(node, mesh, numbers)
        if claimed != computed:
            given = ", ".join(f"{symbol} = {numbers[symbol]}" for symbol in sorted(known.free_symbols, key=str))
            raise VerifyError(f"block {name}: size {node.name!r} claims {known}, which is {claimed} for {given}, and computes {computed}")


def _choices(hints: dict[sympy.Symbol, int]) -> list[dict[sympy.Symbol, int]]:
    return [{symbol: factor * hint for symbol, hint in hints.items()} for factor in (1, 3)]


def _differ(a: Any, b: Any, hints: dict[sympy.Symbol, int]) -> bool:
    return any(_number(a, numbers) != _number(b, numbers) for numbers in _choices(hints))


def _number(size: Any, numbers: dict[sympy.Symbol, int]) -> int:
    return int(evaluate(size, numbers)) if isinstance(size, sympy.Expr) else int(size)


def _size_of(node: fx.Node, mesh: dict[str, int], numbers: dict[sympy.Symbol, int]) -> int:
    """What the node computes from what its operands claim."""
    if node.target is SYM_SIZE:
        source, dim = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(dim, int)
        return _number(_local(_values(source)[0], mesh)[dim], numbers)
    assert callable(node.target)
    return int(node.target(*(_number(info(a).size if isinstance(a, fx.Node) else a, numbers) for a in node.args)))


def _check_shape_argument(name: str, node: fx.Node, mesh: dict[str, int], hints: dict[sympy.Symbol, int]) -> None:
    if node.target in SPLITS:
        _check_pieces(name, node, mesh)
    if node.target is SLICE:
        _check_slice(name, node, mesh)
    if node.target not in SHAPE_ARGUMENT:
        return
    given = node.args[SHAPE_ARGUMENT[node.target]]
    (value,) = _values(node)
    assert isinstance(given, list | tuple)
    for dim, (size, local) in enumerate(zip(given, value.local_shape(mesh), strict=True)):
        number = info(size).size if isinstance(size, fx.Node) else size
        if number not in (-1, local) and _differ(number, local, hints):
            raise VerifyError(f"block {name}: {name_of(node)} makes dim {dim} of size {number}, a rank holds {local}")


def _check_pieces(name: str, node: fx.Node, mesh: dict[str, int]) -> None:
    given, dim = node.args[1], split_dim(node)
    lengths = [_local(value, mesh)[dim] for value in _values(node)]
    claimed = [given] * (len(lengths) - 1) + [min(given, lengths[-1])] if isinstance(given, int) else given
    if claimed != lengths:
        raise VerifyError(f"block {name}: {name_of(node)} makes pieces of {given}, a rank holds {lengths}")


def _check_slice(name: str, node: fx.Node, mesh: dict[str, int]) -> None:
    """The length that integer bounds take must be the local one."""
    given, (value,) = named_arguments(node), _values(node)
    dim = given["dim"] % len(value.shape)
    source, local = _local(_values(given["self"])[0], mesh)[dim], _local(value, mesh)[dim]
    start, end, step = given["start"] or 0, given["end"], given["step"]
    if all(isinstance(bound, int) for bound in (start, 0 if end is None else end)) and source.is_Integer:
        taken = len(range(int(source))[start : TO_THE_END if end is None else end : step])
        if taken != local:
            raise VerifyError(f"block {name}: {name_of(node)} takes {taken} of dim {dim}, a rank holds {local}")


def _verify_root(program: Program) -> None:
    """Blocks get what their bodies were lowered for, and hand on what the bodies return."""
    for node in program.root.graph.nodes:
        if node.op == "get_attr":
            name = str(node.target).removeprefix(STATE)
            if name not in program.state:
                raise VerifyError(f"the program reads {name!r}, which is no state of the model")
            if program.state[name].value.placements != _values(node)[0].placements:
                raise VerifyError(
                    f"state {name!r} is placed as {program.state[name].value.placements}, read as {_values(node)[0].placements}"
                )
        elif node.op == "call_module":
            _verify_call(program, node)
    for axis in program.mesh:
        for node in program.outputs():
            _check_output(node, axis, _values(node)[0].on(axis), is_loss=not program.results)


def _check_output(node: fx.Node, axis: str, found: Placement, is_loss: bool) -> None:
    """The loss is summed; what a pipeline stage hands on may be sharded, but no other stage could add up summands."""
    if is_loss and found != Invariant():
        raise VerifyError(f"the loss is {found} on axis {axis!r}, expected I: its parts are not summed")
    if found == Partial():
        raise VerifyError(f"{node.name!r} leaves the stage as {found} on axis {axis!r}, expected S(d), I or R: it is not summed")


def _verify_call(program: Program, node: fx.Node) -> None:
    name = str(node.target).removeprefix(BODIES)
    graph = program.body(name).graph
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    if len(inputs) != len(node.args):
        raise VerifyError(f"block {node.name!r} passes {len(node.args)} values to {name}, which takes {len(inputs)}")
    for given, taken in zip(node.args, inputs, strict=True):
        assert isinstance(given, fx.Node)
        _same_placement(f"input {taken.name!r} of block {node.name!r}", _values(given)[0], _values(taken)[0])
    (output,) = (n for n in graph.nodes if n.op == "output")
    for value, result in zip(_values(node), output.args[0], strict=True):
        _same_placement(f"an output of block {node.name!r}", value, _values(result)[0])
    for user in node.users:
        index = user.args[1] if user.target is operator.getitem else None
        if isinstance(index, int):
            _same_placement(f"{user.name!r}", _values(user)[0], _values(node)[index])


def _same_placement(what: str, found: Value, expected: Value) -> None:
    if not _equal(found, expected):
        axis = next(a for a, p in expected.placements if found.on(a) != p)
        raise VerifyError(f"{what} is {found.on(axis)} on axis {axis!r}, expected {expected.on(axis)}")


def _equal(a: Value, b: Value) -> bool:
    if a.placements == b.placements:
        return True
    if a.requires_grad and b.requires_grad:
        return False
    return [(x, as_value(p)) for x, p in a.placements] == [(x, as_value(p)) for x, p in b.placements]

"""Programs as text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx

from hgc._torch_compat import OpOverload
from hgc.ir.program import Block, Program
from hgc.ir.value import Info, Value, info

_ROOT_STATE = ("parameter", "buffer")


def format_program(program: Program, expand: str | None = None) -> str:
    """Readable text: inputs, blocks in order with runs of equal blocks collapsed, then each body once.

    ``expand`` names one body to print alone. Shapes are symbolic and global; after lowering each value also shows what one rank
    holds and its placement on each mesh axis, and collectives are marked with ``>>``.
    """
    if expand is not None:
        return "\n".join(_body_lines(program, expand))
    lines = [_headline(program)]
    lines += [
        f"  {symbol} = {found.meaning}, {_range(found.low, found.high)}, traced with {found.hint}"
        for symbol, found in program.symbols.items()
    ]
    lines += ["", "inputs"]
    lines += [f"  {node.name}: {_value(info(node).value, program.mesh)}" for node in program.inputs()]
    lines += ["", "blocks", *(f"  {line}" for line in _block_lines(program))]
    for name in program.bodies:
        lines += ["", *_body_lines(program, name)]
    if program.report:
        lines += ["", "report", *(f"  {note}" for note in program.report)]
    return "\n".join(lines)


def _headline(program: Program) -> str:
    numel = sum((entry.value.numel for entry in program.state.values() if entry.kind == "parameter"), sympy.Integer(0))
    mesh = "".join(f", {axis}={size}" for axis, size in program.mesh.items())
    blocks = sum(1 for _ in program.blocks())
    return f"{program.name}: {_count(int(numel))} parameters, {blocks} blocks of {len(program.bodies)} kinds{mesh}"


def _count(number: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _range(low: int, high: int | None) -> str:
    return f"{low} to {high}" if high is not None else f"at least {low}"


@dataclass(frozen=True)
class _Run:
    blocks: list[Block]


def _block_lines(program: Program) -> list[str]:
    lines = []
    for run in _runs(list(program.blocks())):
        first, last = run.blocks[0], run.blocks[-1]
        count = f" x{len(run.blocks)}" if len(run.blocks) > 1 else ""
        where = _path_range(first.path, last.path) if count else first.path
        results = info(last.node).value
        assert isinstance(results, tuple)
        shapes = ", ".join(_value(v, program.mesh) for v in results)
        passed = [a.name for a in first.node.args if isinstance(a, fx.Node) and info(a).role not in _ROOT_STATE]
        held = sum(1 for a in first.node.args if isinstance(a, fx.Node) and info(a).role in _ROOT_STATE)
        again = "  recomputed" if info(first.node).recompute else ""
        lines.append(f"{where or first.body}{count}: {first.body}({', '.join(passed)}, {held} weights) -> {shapes}{again}")
    return lines


def _runs(blocks: list[Block]) -> Iterator[_Run]:
    """Neighbours that call the same body from the same list of modules."""
    current: list[Block] = []
    for block in blocks:
        if current and not _alike(current[-1], block):
            yield _Run(current)
            current = []
        current.append(block)
    if current:
        yield _Run(current)


def _alike(before: Block, block: Block) -> bool:
    same = block.body == before.body and info(block.node).recompute == info(before.node).recompute
    return same and bool(block.path) and _stem(block.path) == _stem(before.path)


def _stem(path: str) -> str:
    return path.rpartition(".")[0]


def _path_range(first: str, last: str) -> str:
    return f"{first}-{last.rpartition('.')[2]}" if first != last else first


def _body_lines(program: Program, name: str) -> list[str]:
    body = program.body(name)
    uses = sum(1 for block in program.blocks() if block.body == name)
    lines = [f"{name} (called {uses} times)" if uses > 1 else name]
    for node in body.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"  {_placeholder(node, program.mesh)}")
        elif node.op == "output":
            lines.append(f"  return {_argument(node.args[0])}")
        else:
            lines.append(_node_line(node, program.mesh))
    return lines


def _placeholder(node: fx.Node, mesh: dict[str, int]) -> str:
    found = info(node)
    kind = f"{found.role} {found.path}" if found.role in _ROOT_STATE else "input"
    return f"{node.name}: {_value(found.value, mesh)}  # {kind}"


def _node_line(node: fx.Node, mesh: dict[str, int]) -> str:
    found = info(node)
    arguments = [_argument(a) for a in node.args] + [f"{key}={_argument(a)}" for key, a in node.kwargs.items()]
    call = f"{operator_label(node)}({', '.join(arguments)})"
    mark = ">>" if is_collective(node) else "  "
    return f"{mark}{node.name} = {call}  # {_described(found, mesh)}"


def _described(found: Info, mesh: dict[str, int]) -> str:
    if found.size is not None:
        return str(found.size)
    where = f"  {found.path}" if found.path else ""
    return _value(found.value, mesh) + where + ("  recomputed" if found.recompute else "")


def operator_label(node: fx.Node) -> str:
    """``linear``, ``attention``, ``*``: an operator without namespaces and overloads."""
    if isinstance(node.target, OpOverload):
        return str(node.target._schema.name).rpartition("::")[2]
    return str(getattr(node.target, "__name__", node.target))


def is_collective(node: fx.Node) -> bool:
    """True for an operator that communicates, or changes the kind of replication."""
    return getattr(node.target, "__module__", "") == "hgc.ir.ops.collectives"


def _value(value: Value | tuple[Value, ...] | None, mesh: dict[str, int]) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return "(" + ", ".join(_value(v, mesh) for v in value) + ")"
    text = f"{_dtype(value.dtype)}{_shape(value.shape)}"
    if value.placements:
        placed = " ".join(f"{axis}:{placement}" for axis, placement in value.placements)
        text += f" local {_shape(value.local_shape(mesh))} {{{placed}}}"
    return text


def _shape(shape: tuple[sympy.Expr, ...]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def _dtype(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    short = {"float64": "f64", "float32": "f32", "float16": "f16", "bfloat16": "bf16", "int64": "i64", "int32": "i32"}
    return short.get(name, name)


def _argument(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        return argument.name
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(map(_argument, argument)) + "]"
    if isinstance(argument, torch.dtype):
        return _dtype(argument)
    return "end" if argument == 2**63 - 1 else repr(argument)

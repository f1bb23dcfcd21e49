"""Stable hashes: equal for programs that compute the same, whatever the names of their nodes, in every process."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import sympy
import torch
from torch import fx

from hgc._torch_compat import OpOverload
from hgc.ir.program import Program, State
from hgc.ir.value import Info, Value, info


def program_hash(program: Program) -> str:
    """64 hex digits over blocks, bodies, state, symbols and mesh; node names, source lines and example sizes do not count."""
    return _hash(program, with_names=True)


def structure_hash(program: Program) -> str:
    """The same whatever the original names of state and blocks: equal for pipeline stages that do the same with other layers."""
    return _hash(program, with_names=False)


def _hash(program: Program, with_names: bool) -> str:
    digest = hashlib.sha256()
    bodies = {name: body_hash(body) for name, body in program.bodies.items()}
    for line in _graph_lines(program.root.graph, lambda node: bodies[str(node.target).removeprefix("bodies.")], with_names):
        digest.update(line.encode())
    for entry in program.state.values():
        digest.update(_state_line(entry if with_names else replace(entry, name="", aliases=())).encode())
    for symbol, found in program.symbols.items():
        digest.update(f"{symbol}:{found.meaning}:{found.low}:{found.high};".encode())
    digest.update(repr(program.mesh).encode())
    return digest.hexdigest()


def body_hash(body: fx.GraphModule) -> str:
    """64 hex digits over operators, arguments, shapes, types, placements and the relative names of the state it reads."""
    digest = hashlib.sha256()
    for line in _graph_lines(body.graph, lambda node: str(node.target), with_paths=False):
        digest.update(line.encode())
    return digest.hexdigest()


def _graph_lines(graph: fx.Graph, module_name: Callable[[fx.Node], str], with_paths: bool) -> list[str]:
    numbers: dict[fx.Node, int] = {}
    lines = []
    for number, node in enumerate(graph.nodes):
        numbers[node] = number
        if node.op in ("placeholder", "get_attr"):
            what = f"{node.target}" if with_paths else ""
        elif node.op == "call_module":
            what = module_name(node)
        else:
            what = target_name(node.target)
        described = "" if node.op == "output" else _describe(info(node), with_paths, in_root=node.op == "get_attr")
        lines.append(f"{node.op} {what} {_encode(node.args, numbers)} {_encode(node.kwargs, numbers)} {described}\n")
    return lines


def target_name(target: Any) -> str:
    """The full name of what a node calls, without addresses."""
    if isinstance(target, str | OpOverload):
        return str(target)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _describe(found: Info, with_paths: bool, in_root: bool) -> str:
    """A body tells its state apart by path; every other path only says where a node came from."""
    path = found.path if with_paths or (found.role in ("parameter", "buffer") and not in_root) else ""
    size, again = found.size if found.size is not None else "", "|recompute" if found.recompute else ""
    return f"{found.role}|{path}|{_encode_value(found.value)}|{size}{again}"


def _encode_value(value: Value | tuple[Value, ...] | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, tuple):
        return "(" + ",".join(map(_encode_value, value)) + ")"
    placements = ",".join(f"{axis}={placement}" for axis, placement in value.placements)
    return f"{value.dtype}{list(map(str, value.shape))}{'g' if value.requires_grad else ''}@{placements}"


def _encode(argument: Any, numbers: dict[fx.Node, int]) -> str:
    if isinstance(argument, fx.Node):
        return f"%{numbers[argument]}"
    if isinstance(argument, list | tuple):
        return "[" + ",".join(_encode(a, numbers) for a in argument) + "]"
    if isinstance(argument, dict):
        return "{" + ",".join(f"{key}:{_encode(a, numbers)}" for key, a in sorted(argument.items())) + "}"
    if isinstance(argument, sympy.Expr):
        return f"<{argument}>"
    return repr(argument)


def _state_line(entry: State) -> str:
    data = "" if entry.data is None else hashlib.sha256(_bytes(entry.data)).hexdigest()
    copies = f":{len(entry.stages)}" if entry.stages else ""
    return f"{entry.name}:{entry.kind}:{','.join(entry.aliases)}:{entry.persistent}:{_encode_value(entry.value)}:{data}{copies};"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()

"""Single-device meaning: a distributed program with hgc's operators dropped and global sizes restored is its reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from hgc.errors import VerifyError
from hgc.ir import ops
from hgc.ir.placement import Shard
from hgc.ir.program import Program
from hgc.ir.rules.collectives import COLLECTIVES
from hgc.ir.rules.core import TO_THE_END, named_arguments
from hgc.ir.sizes import SHAPE_ARGUMENT, SLICE, SPLITS
from hgc.ir.value import Value, info, is_size

aten = torch.ops.aten
_CROSS_ENTROPY = {"none": 0, "mean": 1, "sum": 2}


def check_meaning(program: Program, reference: Program) -> None:
    """Raise :class:`~hgc.errors.VerifyError` if the programs differ by more than placement."""
    calls, originals = list(program.blocks()), list(reference.blocks())
    if [c.path for c in calls] != [o.path for o in originals]:
        raise VerifyError("the program calls other blocks than the model it was made from")
    _check_root(program, reference)
    seen: set[tuple[str, str]] = set()
    for call, original in zip(calls, originals, strict=True):
        if (call.body, original.body) not in seen:
            seen.add((call.body, original.body))
            _compare(call.body, program.body(call.body).graph, reference.body(original.body).graph, program.mesh)


def _check_root(program: Program, reference: Program) -> None:
    """The root graph is the same but for the names of bodies."""
    nodes: dict[fx.Node, fx.Node] = {}
    pairs = list(zip(program.root.graph.nodes, reference.root.graph.nodes, strict=False))
    if len(program.root.graph.nodes) != len(reference.root.graph.nodes):
        raise VerifyError("the root graph has other nodes than the model it was made from")
    for node, original in pairs:
        same_args = fx.map_arg(node.args, lambda a: nodes.get(a)) == original.args
        same_target = node.op == original.op and (node.op in ("call_module", "placeholder") or node.target == original.target)
        if not same_args or not same_target:
            raise VerifyError(f"root node {node.name!r} differs from {original.name!r} of the model it was made from")
        nodes[node] = original


def _compare(name: str, graph: fx.Graph, reference: fx.Graph, mesh: Mapping[str, int]) -> None:
    """Match every node to one of the reference that does the same to the same values."""
    table: dict[Any, list[fx.Node]] = {}
    for node in reference.nodes:
        if node.op == "call_function" and not is_size(node):
            table.setdefault(_key(node, {}, {}), []).append(node)
    originals = [n for n in reference.nodes if n.op == "placeholder"]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    match: dict[fx.Node, fx.Node] = dict(zip(placeholders, originals, strict=True))
    used: set[fx.Node] = set()
    live, original = _live(graph), _live(reference)
    for node in graph.nodes:
        if node.op == "call_function" and not is_size(node) and node in live:
            match[node] = _match(name, node, match, table, used, mesh)
        elif node.op == "output":
            _check_outputs(name, node, match, reference)
    forgotten = [n for n in reference.nodes if n.op == "call_function" and not is_size(n) and n in original and n not in used]
    if forgotten:
        raise VerifyError(f"block {name} lost {forgotten[0].name!r} ({forgotten[0].target}) of the model")


def _live(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that the outputs depend on; what else a graph computes has no meaning."""
    live: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output" or any(user in live for user in node.users):
            live.add(node)
    return live


def _match(
    name: str, node: fx.Node, match: dict[fx.Node, fx.Node], table: dict[Any, list[fx.Node]], used: set[fx.Node], mesh: Mapping[str, int]
) -> fx.Node:
    if node.target in COLLECTIVES:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return match[source]
    found = table.get(_key(node, match, mesh))
    if not found:
        raise VerifyError(
            f"block {name}: {node.name!r} ({node.target}) has no counterpart in the model: operator, operands or sizes differ"
        )
    chosen = next((n for n in found if n not in used), found[-1])
    used.add(chosen)
    if _global_shape(node) != _global_shape(chosen):
        raise VerifyError(f"block {name}: {node.name!r} has shape {_global_shape(node)}, in the model {_global_shape(chosen)}")
    return chosen


def _check_outputs(name: str, node: fx.Node, match: dict[fx.Node, fx.Node], reference: fx.Graph) -> None:
    (original,) = (n for n in reference.nodes if n.op == "output")
    results, expected = node.args[0], original.args[0]
    assert isinstance(results, list | tuple)
    assert isinstance(expected, list | tuple)
    if [match[n] for n in results if isinstance(n, fx.Node)] != list(expected):
        raise VerifyError(f"block {name} returns other values than the model")


def _global_shape(node: fx.Node) -> Any:
    value = info(node).value
    return [v.shape for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Value)]


def _key(node: fx.Node, match: dict[fx.Node, fx.Node], mesh: Mapping[str, int]) -> Any:
    """Operator and arguments in the reference's terms; output shapes stand for size arguments."""
    target, arguments = _original(node, mesh)
    skipped = _follows_output(node)
    parts = [(k, _freeze(v, match)) for k, v in sorted(arguments.items()) if k not in skipped]
    return target, tuple(parts), str(_global_shape(node)) if skipped else ""


def _follows_output(node: fx.Node) -> tuple[str, ...]:
    """Arguments that say no more than the output's shape does."""
    names = list(named_arguments(node))
    if node.target in SHAPE_ARGUMENT:
        return (names[SHAPE_ARGUMENT[node.target]],)
    return (names[1],) if node.target in SPLITS else ()


def _freeze(argument: Any, match: dict[fx.Node, fx.Node]) -> Any:
    if isinstance(argument, fx.Node):
        if is_size(argument):
            return ("size", str(info(argument).size))
        return match.get(argument, argument)
    if isinstance(argument, list | tuple):
        return tuple(_freeze(a, match) for a in argument)
    if isinstance(argument, int | float | bool | str) or argument is None:
        return (type(argument).__name__, argument)
    return str(argument)


def _original(node: fx.Node, mesh: Mapping[str, int]) -> tuple[Any, dict[str, Any]]:
    """The single-device operator that a sharded one stands for."""
    given = named_arguments(node)
    if node.target is aten.cross_entropy_loss.default:
        given["vocab_size"] = None
    undo = _UNDO.get(node.target)
    if undo is not None:
        return undo(given)
    given.pop("random_axes", None)
    given.pop("where", None)
    if node.target is ops.attention:
        given |= {"exchange_axis": None, "ring_axis": None, "zigzag": False}
    if node.target is SLICE:
        _global_bounds(node, given, mesh)
    return node.target, given


def _global_bounds(node: fx.Node, given: dict[str, Any], mesh: Mapping[str, int]) -> None:
    """Undo the division of a slice that takes one part of a strided shard."""
    value = info(node).value
    assert isinstance(value, Value)
    dim = given["dim"] % len(value.shape)
    ranks = 1
    for axis, placement in value.placements:
        ranks *= mesh[axis] if isinstance(placement, Shard) and placement.dim == dim else 1
    given["start"] = given["start"] * ranks if isinstance(given["start"], int) else given["start"]
    given["end"] = given["end"] * ranks if isinstance(given["end"], int) and given["end"] < TO_THE_END else given["end"]


def _embedding(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return aten.embedding.default, {
        "weight": given["weight"],
        "indices": given["ids"],
        "padding_idx": given["padding_idx"],
        "scale_grad_by_freq": False,
        "sparse": False,
    }


def _cross_entropy(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return aten.cross_entropy_loss.default, {
        "self": given["logits"],
        "target": given["target"],
        "weight": given["weight"],
        "vocab_size": given["vocab_size"],
        "reduction": _CROSS_ENTROPY[given["reduction"]],
        "ignore_index": given["ignore_index"],
        "label_smoothing": given["label_smoothing"],
    }


def _mean(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if given["dim"] is None:
        return aten.mean.default, {"self": given["x"], "dtype": given["dtype"]}
    return aten.mean.dim, {"self": given["x"], "dim": given["dim"], "keepdim": given["keepdim"], "dtype": given["dtype"]}


def _batch_norm(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    names = ("x", "weight", "bias", "mean", "var", "training", "momentum", "eps")
    return ops.batch_norm, {name: given[name] for name in names} | {"batch_axes": ()}


_UNDO: dict[Any, Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]] = {
    ops.vocab_embedding: _embedding,
    ops.cross_entropy: _cross_entropy,
    ops.mean: _mean,
    ops.batch_norm: _batch_norm,
}

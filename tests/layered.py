"""A hand-made program of equal layers, so that pictures are tested without tracing a model."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import fx, nn

from hgc.ir import ops
from hgc.ir.placement import Invariant, Partial, Placement, Shard
from hgc.ir.program import BODIES, STATE, Program, State, SymbolInfo, new_root
from hgc.ir.value import Info, Value, set_info, value

BATCH, LENGTH = sympy.symbols("B T", integer=True, positive=True)
HIDDEN, INNER, VOCAB = sympy.Integer(64), sympy.Integer(256), sympy.Integer(1000)
aten = torch.ops.aten


class BodyBuilder:
    """Adds nodes with their values to a body's graph."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def place(self, name: str, shape: tuple[sympy.Expr, ...], placements: str, role: str = "input", path: str = "") -> fx.Node:
        node = self.graph.placeholder(name)
        set_info(node, Info(_value(shape, placements), role=role, path=path))
        return node

    def call(self, target: Callable[..., Any], *args: Any, shape: tuple[sympy.Expr, ...], placements: str, path: str = "") -> fx.Node:
        node = self.graph.call_function(target, args)
        set_info(node, Info(_value(shape, placements), path=path))
        return node

    def finish(self, name: str, *results: fx.Node) -> fx.GraphModule:
        self.graph.output(results)
        return fx.GraphModule(nn.Module(), self.graph, class_name=name)


KINDS: dict[str, Placement] = {"0": Shard(0), "1": Shard(1), "2": Shard(2), "P": Partial(), "I": Invariant()}


def _value(shape: tuple[sympy.Expr, ...], placements: str) -> Value:
    """``placements``: a letter or dim for each of dp and tp, or ``""``."""
    pairs = tuple((axis, KINDS[letter]) for axis, letter in zip(("dp", "tp"), placements, strict=False))
    return Value(shape, torch.float32, placements=pairs)


def layer() -> fx.GraphModule:
    """A normalisation and a tensor-parallel MLP with a residual, as lowering leaves it."""
    b = BodyBuilder()
    x = b.place("x", (BATCH, LENGTH, HIDDEN), "01")
    norm = b.place("norm", (HIDDEN,), "II", "parameter", "norm.weight")
    up = b.place("up", (INNER, HIDDEN), "I0", "parameter", "mlp.up.weight")
    down = b.place("down", (HIDDEN, INNER), "I1", "parameter", "mlp.down.weight")
    full = (BATCH, LENGTH, HIDDEN)
    size = b.graph.call_function(aten.sym_size.int, (x, 0))
    set_info(size, Info(size=BATCH))
    squared = b.call(aten.pow.Tensor_Scalar, x, 2, shape=full, placements="01", path="norm")
    mean = b.call(aten.mean.dim, squared, [-1], True, shape=(BATCH, LENGTH, sympy.Integer(1)), placements="01", path="norm")
    scale = b.call(aten.rsqrt.default, mean, shape=(BATCH, LENGTH, sympy.Integer(1)), placements="01", path="norm")
    normed = b.call(aten.mul.Tensor, x, scale, shape=full, placements="01", path="norm")
    weight = b.call(ops.copy_in, norm, "tp", shape=(HIDDEN,), placements="II", path="norm")
    normed = b.call(aten.mul.Tensor, normed, weight, shape=full, placements="01", path="norm")
    whole = b.call(ops.all_gather, normed, 1, "tp", shape=full, placements="0I", path="mlp")
    inner = b.call(aten.linear.default, whole, up, shape=(BATCH, LENGTH, INNER), placements="02", path="mlp.up")
    inner = b.call(aten.gelu.default, inner, shape=(BATCH, LENGTH, INNER), placements="02", path="mlp.act")
    part = b.call(aten.linear.default, inner, down, shape=full, placements="0P", path="mlp.down")
    part = b.call(ops.reduce_scatter, part, 1, "tp", shape=full, placements="01", path="mlp")
    return b.finish("Layer", b.call(aten.add.Tensor, x, part, shape=full, placements="01"))


def embedding() -> fx.GraphModule:
    b = BodyBuilder()
    ids = b.place("ids", (BATCH, LENGTH), "0I")
    weight = b.place("weight", (VOCAB, HIDDEN), "I0", "parameter", "embed.weight")
    part = b.call(ops.vocab_embedding, weight, ids, "tp", shape=(BATCH, LENGTH, HIDDEN), placements="0P", path="embed")
    return b.finish("Embedding", b.call(ops.reduce_scatter, part, 1, "tp", shape=(BATCH, LENGTH, HIDDEN), placements="01", path="embed"))


def head() -> fx.GraphModule:
    b = BodyBuilder()
    x = b.place("x", (BATCH, LENGTH, HIDDEN), "01")
    labels = b.place("labels", (BATCH, LENGTH), "0I")
    weight = b.place("weight", (VOCAB, HIDDEN), "I0", "parameter", "head.weight")
    logits = b.call(aten.linear.default, x, weight, shape=(BATCH, LENGTH, VOCAB), placements="02", path="head")
    loss = b.call(ops.cross_entropy, logits, labels, shape=(), placements="PI")
    return b.finish("Loss", b.call(ops.all_reduce, loss, "dp", shape=(), placements="II"))


def layered_program(kinds: list[str]) -> Program:
    """Embedding, one block for each of ``kinds`` (equal names share a body), loss; lowered for dp 2 x tp 2."""
    bodies = {"Embedding": embedding(), "Loss": head()} | {kind: layer() for kind in dict.fromkeys(kinds)}
    graph, state = fx.Graph(), {}
    ids, labels = graph.placeholder("input_ids"), graph.placeholder("labels")
    for node in (ids, labels):
        set_info(node, Info(Value((BATCH, LENGTH), torch.int64, placements=(("dp", Shard(0)), ("tp", Invariant())))))

    def block(name: str, path: str, *inputs: fx.Node) -> fx.Node:
        given = []
        for parameter in (node for node in bodies[name].graph.nodes if node.op == "placeholder" and node.meta["hgc"].role == "parameter"):
            full = f"{path}.{parameter.meta['hgc'].path}".lstrip(".")
            state[full] = State(full, value(parameter), "parameter")
            given.append(graph.get_attr(STATE + full))
            set_info(given[-1], Info(value(parameter), role="parameter", path=full))
        call = graph.call_module(BODIES + name, (*inputs, *given))
        (output,) = (node for node in bodies[name].graph.nodes if node.op == "output")
        result = value(output.args[0][0])  # type: ignore[index, union-attr, arg-type]
        set_info(call, Info((result,), path=path))
        taken = graph.call_function(operator.getitem, (call, 0))
        set_info(taken, Info(result))
        return taken

    x = block("Embedding", "", ids)
    for index, kind in enumerate(kinds):
        x = block(kind, f"model.layers.{index}", x)
    graph.output(block("Loss", "", x, labels))
    symbols = {BATCH: SymbolInfo("batch", 2, None, 4), LENGTH: SymbolInfo("sequence", 2, 2048, 8)}
    return Program(new_root(graph, state, bodies), symbols, state, mesh={"dp": 2, "tp": 2}, name="Layered")

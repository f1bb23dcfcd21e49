"""Blocks, shared bodies, names, ties, gradients: what the other parts of hgc rely on."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc import empty_weights, trace
from hgc.ir.ops.attention import attention
from hgc.ir.program import Program
from hgc.ir.value import Info, Value, info, value
from hgc.tools.bench import zoo
from tests.tracing.small import Layer, Stack, ids


@pytest.fixture(scope="module")
def llama() -> Program:
    entry = zoo.find("Llama")
    return trace(entry.build("small"), entry.batch(2, 9))


def test_isomorphic_blocks_share_one_body(llama: Program) -> None:
    assert [block.body for block in llama.blocks()] == ["Embeddings", *["LlamaDecoderLayer"] * 3, "Head"]
    assert [block.path for block in llama.blocks()] == ["", "model.layers.0", "model.layers.1", "model.layers.2", ""]


def test_every_node_has_info_and_sizes_stay_in_bodies(llama: Program) -> None:
    for graph in (llama.root.graph, *(body.graph for body in llama.bodies.values())):
        for node in graph.nodes:
            assert node.op == "output" or isinstance(node.meta["hgc"], Info)
    assert {node.op for node in llama.root.graph.nodes} == {"placeholder", "get_attr", "call_module", "call_function", "output"}
    assert all(node.target is operator.getitem for node in llama.root.graph.nodes if node.op == "call_function")
    assert [node.name for node in llama.inputs()] == ["input_ids", "labels"]


def test_body_placeholders_are_activations_then_state(llama: Program) -> None:
    placeholders = [node for node in llama.body("LlamaDecoderLayer").graph.nodes if node.op == "placeholder"]
    assert [node.name for node in placeholders[:3]] == ["x", "cos", "sin"]
    assert [info(node).role for node in placeholders] == ["input"] * 3 + ["parameter"] * 9
    for block in llama.blocks():
        for placeholder, argument in zip(
            (n for n in llama.body(block.body).graph.nodes if n.op == "placeholder"), block.node.args, strict=True
        ):
            if info(placeholder).role == "parameter":
                assert isinstance(argument, torch.fx.Node)
                prefix = f"{block.path}." if block.path else ""
                assert info(argument).path == prefix + info(placeholder).path


def test_attention_is_one_node(llama: Program) -> None:
    nodes = [node for node in llama.body("LlamaDecoderLayer").graph.nodes if node.target is attention]
    assert len(nodes) == 1
    q, k, _, bias, sinks, causal, window, *_ = nodes[0].args
    assert (bias, sinks, causal, window) == (None, None, True, 0)
    assert value(q).shape[1] == 4  # type: ignore[arg-type]
    assert value(k).shape[1] == 2  # type: ignore[arg-type]


def test_windows_and_caps_are_attributes() -> None:
    entry = zoo.find("Gemma 2")
    program = trace(entry.build("small"), entry.batch(2, 9))
    found = {n.args[5:9] for body in program.bodies.values() for n in body.graph.nodes if n.target is attention}
    assert found == {(True, 5, 0.25, 50.0), (True, 0, 0.25, 50.0)}


def test_tied_parameters_are_one() -> None:
    entry = zoo.find("nanoGPT, tied weights")
    program = trace(entry.build("small"), entry.batch(2, 9), loss=entry.loss)
    assert program.state["wte.weight"].aliases == ("head.weight",)
    assert "head.weight" not in program.state
    untied = {name: entry.value for name, entry in program.state.items()}
    assert sum(1 for v in untied.values() if v.requires_grad) == len(untied)


def test_frozen_parameters_need_no_gradient() -> None:
    model = Stack([Layer() for _ in range(3)])
    model.embed.requires_grad_(False)
    program = trace(model, ids())
    first = next(node for node in program.root.graph.nodes if node.target is operator.getitem)
    assert not value(first).requires_grad
    assert value(program.output()).requires_grad
    model.layers[1].requires_grad_(False)
    assert len(trace(model, ids()).bodies) == 4


def test_one_module_called_often_is_one_body() -> None:
    shared = Layer()
    program = trace(Stack([shared] * 4), ids())
    assert [block.path for block in program.blocks()].count("layers.0") == 4
    assert set(program.state) >= {"layers.0.lin.weight"}
    assert "layers.3.lin.weight" in program.state["layers.0.lin.weight"].aliases


class _Cross(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Layer(), nn.Linear(16, 16)

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(x) + self.outer(memory), memory


class _EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Layer(), Layer(), Layer())
        self.decoder = nn.ModuleList(_Cross() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.encoder(x)
        for layer in self.decoder:
            x, memory = layer(x, memory)
        return x.square().mean()


def test_values_that_pass_through_a_block_are_edges_of_the_root() -> None:
    program = trace(_EncoderDecoder(), {"x": torch.randn(3, 5, 16)})
    assert [block.body for block in program.blocks()] == ["Layer"] * 3 + ["Cross"] * 3 + ["Head"]
    crosses = [block.node for block in program.blocks() if block.body == "Cross"]
    assert len({node.args[1] for node in crosses}) == 1
    assert all(isinstance(info(node).value, tuple) and len(info(node).value) == 1 for node in crosses)  # type: ignore[arg-type]


class _Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([expert(x) for expert in self.experts]).mean()


def test_modules_side_by_side_are_no_blocks() -> None:
    program = trace(_Experts(), {"x": torch.randn(3, 16)})
    assert len(list(program.blocks())) == 1


def test_strange_names_break_nothing() -> None:
    model = nn.Module()
    stack = nn.ModuleDict({"my layer!": Layer(), "2": Layer(), "class": Layer(), "größe": Layer(), 'a"); import os; ("': Layer()})
    model.add_module("a b", stack)

    def forward(input: Tensor, *, lambda_: Tensor) -> Tensor:
        for layer in stack.values():
            input = layer(input)
        return (input * lambda_).mean()

    model.forward = forward  # type: ignore[method-assign]
    model.add_module("unused", nn.Linear(2, 2))
    batch = {"input": torch.randn(3, 16), "lambda_": torch.randn(3, 1)}
    program = trace(_Calls(model), batch)
    state = dict(_Calls(model).named_parameters())
    torch.testing.assert_close(program.run(batch, state), forward(**batch))
    for body in program.bodies:
        assert body.isidentifier()


class _Calls(nn.Module):
    """``nn.Module`` instances with a forward of their own cannot be copied; a class that holds one can."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.stack = model.get_submodule("a b")

    def forward(self, input: Tensor, lambda_: Tensor) -> Tensor:
        for layer in self.stack.children():
            input = layer(input)
        return (input * lambda_).mean()


def test_empty_weights_keep_buffers() -> None:
    entry = zoo.find("Llama")
    with empty_weights():
        model = entry.build("small")
    assert all(p.is_meta for p in model.parameters())
    program = trace(model, entry.batch(2, 9))
    real = entry.build("small")
    batch = entry.batch(2, 9)
    torch.testing.assert_close(program.run(batch, dict(real.named_parameters())), real(**batch).loss)


def test_constants_are_state() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)
            self.scale = torch.arange(4.0)

        def forward(self, x: Tensor) -> Tensor:
            return F.mse_loss(self.lin(x) * self.scale, torch.tensor([1.0, 2.0, 3.0, 4.0]).expand_as(x))

    model = Scaled()
    batch = {"x": torch.randn(3, 4)}
    program = trace(model, batch)
    kinds = {name: entry.kind for name, entry in program.state.items()}
    assert kinds["scale"] == "constant"
    assert sum(kind == "constant" for kind in kinds.values()) == 2
    torch.testing.assert_close(program.run(batch, dict(model.named_parameters())), model(**batch))


def test_gradients_stop_where_the_model_stops_them() -> None:
    class Stopped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                target = self.a(x)
            return F.mse_loss(self.b(x), target) + self.a(x).detach().mean()

    program = trace(Stopped(), {"x": torch.randn(3, 4)})
    (body,) = program.bodies.values()
    linear = {info(n).path: value(n).requires_grad for n in body.graph.nodes if "linear" in str(n.target)}
    assert linear["b"]
    losses = [n for n in body.graph.nodes if isinstance(info(n).value if n.op != "output" else None, Value) and n.op == "call_function"]
    assert value(losses[-1]).requires_grad

"""What a program costs on one device, against what torch counts and keeps when it really runs."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hgc.cost.symbolic import Formulas, exact
from hgc.errors import HgcError
from hgc.ir.input_sizes import input_sizes
from hgc.passes.analysis.costs import BlockCosts
from hgc.tracing import trace
from tests.cost.small import FAMILIES, SIZES, as_on_gpu, costs, gpu_functions, kept_bytes, state_of, traced


@pytest.mark.parametrize("family", FAMILIES)
def test_flops_are_what_torch_counts_in_the_model(family: str) -> None:
    model, program = traced(family)
    for b, s in SIZES:
        batch = FAMILIES[family][1](b, s)
        sizes = input_sizes(program, batch)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss = loss_of(model, batch)
            forward = counter.get_total_flops()
            loss.backward()
            both = counter.get_total_flops()
        assert exact(costs(family).forward_flops, sizes) == forward
        assert exact(costs(family).backward_flops, sizes) == both - forward


@pytest.mark.parametrize("family", FAMILIES)
def test_saved_bytes_are_what_autograd_keeps(family: str) -> None:
    """Of the program on real tensors, and of the model itself where hgc leaves all its operators as they are."""
    model, program = traced(family)
    changed, state = as_on_gpu(program), state_of(model)
    for b, s in SIZES:
        batch = FAMILIES[family][1](b, s)
        expected = exact(costs(family).saved_bytes, input_sizes(program, batch))
        with gpu_functions():
            assert kept_bytes(lambda batch=batch: changed.run(batch, state), {**state, **batch}) == expected
            if family in ("bert", "vit", "cnn"):
                assert kept_bytes(lambda batch=batch: loss_of(model, batch), {**state, **batch}) == expected


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    found = model(**batch)
    return found if isinstance(found, Tensor) else found.loss


def test_every_body_is_measured_once_and_counted_by_calls() -> None:
    found = costs("llama")
    assert {name: found.calls[name] for name in found.bodies} == {"Embeddings": 1, "LlamaDecoderLayer": 3, "Head": 1}
    assert not found.notes
    layer = found.bodies["LlamaDecoderLayer"]
    assert found.forward_flops == 3 * layer.forward_flops + found.bodies["Head"].forward_flops
    b, s = found.symbols
    assert layer.saved_bytes == 4136 * b * s
    assert layer.output_bytes == 256 * b * s
    assert layer.parameter_bytes == 4 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)


def test_bytes_of_nodes() -> None:
    """A product reads operands and writes its result, views move nothing, a lookup reads the rows that it finds."""
    found = costs("llama")
    b, s = found.symbols
    nodes = {(body.name, node.name): node for body in found.bodies.values() for node in body.nodes}
    product = nodes["LlamaDecoderLayer", "down_proj"]
    assert (product.read_bytes, product.written_bytes) == (512 * b * s + 4 * 64 * 128, 256 * b * s)
    assert product.backward_read_bytes == (256 + 512) * b * s + 4 * 64 * 128
    assert product.backward_written_bytes == 512 * b * s + 4 * 64 * 128
    view = nodes["LlamaDecoderLayer", "transpose"]
    assert (view.read_bytes, view.written_bytes, view.backward_written_bytes) == (0, 0, 0)
    lookup = nodes["Embeddings", "embed_tokens"]
    assert (lookup.read_bytes, lookup.written_bytes) == (264 * b * s, 256 * b * s)


def test_frozen_parameters_save_the_products_of_their_gradients() -> None:
    model, batch = FAMILIES["cnn"][0]()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("conv2" not in name)
    found = BlockCosts().run(trace(model, batch))
    nodes = {node.name: node for body in found.bodies.values() for node in body.nodes}
    assert nodes["stem"].backward_flops == nodes["stem"].forward_flops  # nothing in front of it learns
    assert nodes["conv1"].backward_flops == 2 * nodes["conv1"].forward_flops
    assert nodes["conv2"].backward_flops == nodes["conv2"].forward_flops


def test_an_operator_that_needs_data_is_counted_and_told() -> None:
    program = traced("cnn")[1].copy()
    node = next(n for n in program.body("ResidualBlock").graph.nodes if n.target is torch.ops.aten.relu.default)
    node.target = _reads_numbers
    found = BlockCosts().run(program)
    (note,) = found.notes
    assert "_reads_numbers ('relu' of ResidualBlock) cannot run without data" in note
    (b,) = found.symbols
    assert found.saved_bytes == costs("cnn").saved_bytes + 3 * 4096 * b  # the operand, which relu does not keep


def _reads_numbers(x: Tensor) -> Tensor:
    return x * x.sum().item()


def test_ten_thousand_points_are_quick() -> None:
    found = costs("t5")
    formulas = Formulas(found.expressions(), found.symbols)
    grid = {symbol.name: np.random.default_rng(i).integers(1, 4096, 10_000) for i, symbol in enumerate(found.symbols)}
    times = []
    for _ in range(5):
        start = time.perf_counter()
        values = formulas(grid)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
    point = {symbol: int(grid[symbol.name][17]) for symbol in found.symbols}
    for name, expression in found.expressions().items():
        assert values[name][17] == exact(expression, point)


def test_a_missing_size_is_named() -> None:
    found = costs("llama")
    with pytest.raises(HgcError, match="the size 's' is missing; give a number for each of b, s"):
        Formulas(found.expressions(), found.symbols)({"b": 1})

"""Equal blocks are traced twice; whatever makes that wrong is noticed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from hgc import trace
from hgc.tools.bench import zoo
from hgc.tools.bench.trace_parity import compare
from tests.tracing.small import Layer, Stack, ids


def test_values_that_escape_through_hooks_are_not_lost() -> None:
    """Folded layers run no router, so their logits would be missing from the auxiliary loss."""
    entry = zoo.find("Mixtral")
    torch.manual_seed(0)
    model = entry.build("small")
    model.config.output_router_logits = True
    program = trace(model, entry.batch(2, 9))
    assert compare(model, program, entry.batch(2, 9)).worst <= 1e-5
    assert any("leaves them other than as an output" in line for line in program.report)
    assert sum(block.body == "MixtralDecoderLayer" for block in program.blocks()) == 3


class _Numbered(nn.Module):
    """Layers that look alike and differ by their number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.inner, self.number = Layer(), number

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if self.number < 2 else x + self.inner(x)


def test_a_forward_that_reads_its_number_is_not_folded() -> None:
    model = Stack([_Numbered(i) for i in range(5)])
    program = trace(model, ids())
    assert [block.body for block in program.blocks()][1:-1] == ["Numbered"] * 2 + ["Numbered2"] * 3
    assert compare(model, program, ids()).worst == 0
    assert any("read the number" in line for line in program.report)


class _Countdown(nn.Module):
    """Layers that differ by state outside of them."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__()
        self.inner, self.calls = Layer(), calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls.append(1)
        return self.inner(x) * float(len(self.calls))


def test_bodies_that_differ_are_not_folded() -> None:
    calls: list[int] = []
    model = Stack([_Countdown(calls) for _ in range(4)])
    program = trace(model, ids())
    assert len(program.bodies) == 6
    assert any("look alike and compute differently" in line for line in program.report)
    assert calls == []


class _Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = Layer(), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.factor


def test_plain_attributes_tell_kinds_apart() -> None:
    model = Stack([_Scaled(0.5 if i % 2 else 2.0) for i in range(8)])
    program = trace(model, ids())
    assert [block.body for block in program.blocks()][1:-1] == ["Scaled", "Scaled2"] * 4
    assert program.report == []
    assert compare(model, program, ids()).worst == 0


class _InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Layer()

    def forward(self, x: Tensor) -> Tensor:
        x += 1.0
        return self.inner(x)


class _Keeps(nn.Module):
    """Reads a block's input again after the block changed it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_InPlace() for _ in range(4))
        self.embed = nn.Embedding(11, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * 1.0
        for layer in self.layers:
            x = x + layer(x)
        return x.mean()


def test_blocks_that_change_their_input_in_place() -> None:
    model = _Keeps()
    program = trace(model, ids())
    assert compare(model, program, ids()).worst <= 1e-6


@pytest.mark.parametrize("fold", [True, False])
def test_layers_with_unlike_arguments_keep_their_own(fold: bool) -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Layer()

        def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
            return self.inner(x) if gate is None else self.inner(x) * gate

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(11, 16)
            self.layers = nn.ModuleList(Gated() for _ in range(6))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for number, layer in enumerate(self.layers):
                x = layer(x, x.sigmoid()) if number % 2 else layer(x)
            return x.square().mean()

    model = Model()
    program = trace(model, ids(), fold=fold)
    assert compare(model, program, ids()).worst <= 1e-6

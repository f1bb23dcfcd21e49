"""Calls that repeat become loops, and loops compute what the calls compute."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from hgc.backends.torchrun import emit
from hgc.plan import Plan
from hgc.tracing import trace
from tests.backends.emitted import run_both, state_of


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.fc(x))


class Cross(nn.Module):
    """Reads the other stream, returns both."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.sigmoid(self.fc(y)), y + x


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.fc(x) * mask


def stack(kind: type[nn.Module], count: int) -> nn.ModuleList:
    return nn.ModuleList(kind() for _ in range(count))


class Straight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(Layer, 6)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Alternating(nn.Module):
    """Every second layer sees another mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(Masked, 8)

    def forward(self, x: Tensor) -> Tensor:
        masks = x.sigmoid(), x.tanh()
        for i, layer in enumerate(self.layers):
            x = layer(x, masks[i % 2])
        return x.square().mean()


class Interleaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cross = stack(Layer, 5), stack(Layer, 5), stack(Cross, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        for first, second, cross in zip(self.first, self.second, self.cross, strict=True):
            x, y = cross(first(x), second(y))
        return (x * y).mean()


class Swapping(nn.Module):
    """The two streams change places at every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(Cross, 6)

    def forward(self, x: Tensor) -> Tensor:
        y = x.tanh()
        for layer in self.layers:
            y, x = layer(x, y)
        return (x * y).mean() + x.mean()


class Skipping(nn.Module):
    """Results of the way down are read on the way up, and no loop says so."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = stack(Layer, 4), stack(Cross, 4)

    def forward(self, x: Tensor) -> Tensor:
        seen = []
        for layer in self.down:
            x = layer(x)
            seen.append(x)
        for layer in self.up:
            x, _ = layer(x, seen.pop())
        return x.square().mean()


class Shared(nn.Module):
    """One module called many times."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(Layer, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(7):
            x = self.layers[0](x)
        return x.square().mean()


class Kept(nn.Module):
    """What enters the loop is read again behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = stack(Layer, 4)
        self.more = stack(Masked, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            y = layer(y)
        for layer in self.more:
            y = layer(y, x)
        return (x * y).mean()


CASES: list[tuple[type[nn.Module], list[str]]] = [
    (Straight, ["for layer in self.layers:", "    x = layer(x)"]),
    (Alternating, ["for i in range(0, 8, 2):", "    x = self.layers[i](x, mask)", "    x = self.layers[i + 1](x, mask2)"]),
    (Interleaved, ["for i in range(5):", "self.first[i]", "self.second[i]", "self.cross[i]"]),
    (Swapping, ["for layer in self.layers:"]),
    (Skipping, ["self.down[0]", "self.up[3]"]),
    (Shared, ["for _ in range(7):"]),
    (Kept, ["for layer in self.layers:", "for block in self.more:"]),
]


@pytest.mark.parametrize(("kind", "lines"), CASES, ids=lambda c: c.__name__ if isinstance(c, type) else "")
def test_loop(kind: type[nn.Module], lines: list[str]) -> None:
    torch.manual_seed(0)
    model, inputs = kind(), {"x": torch.randn(4, 8)}
    program = trace(model, inputs)
    source = emit(program, Plan())
    forward = source[source.index("class Model") :]
    for line in lines:
        assert line in forward, forward
    if kind is not Skipping:
        assert len(re.findall(r"^ +\w.* = ", forward, re.MULTILINE)) < 14, forward
    expected, found = run_both(program, state_of(model, program), inputs, source)
    assert torch.equal(expected, found), forward


class Reader(nn.Module):
    """Reads a table that belongs to the whole model."""

    def __init__(self, table: nn.Linear) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)
        self.table = [table]

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(nn.functional.linear(self.fc(x), self.table[0].weight))


class WithTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(8, 8)
        self.layers = nn.ModuleList(Reader(self.table) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.table(x).square().mean()


def test_what_lies_outside_a_block_is_declared_by_its_full_name() -> None:
    source = emit(trace(WithTable(), {"x": torch.randn(4, 8)}), Plan())
    assert 'self.parameter(".table.weight", (8, 8))' in source
    assert "F.linear(fc, self.table.weight)" in source


def test_a_table_outside_the_blocks_is_one_tensor() -> None:
    torch.manual_seed(0)
    model, inputs = WithTable(), {"x": torch.randn(4, 8)}
    program = trace(model, inputs)
    expected, found = run_both(program, state_of(model, program), inputs)
    assert torch.equal(expected, found)

"""Small modules that each show one thing tracing must get right."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 16


class Layer(nn.Module):
    """A residual layer with two parts, so that it counts as a block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.lin = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.lin(self.norm(x)))


class Stack(nn.Module):
    """Layers in a list, and a scalar loss over [B, S] token ids."""

    def __init__(self, layers: list[nn.Module], vocabulary: int = 11, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


class Step(nn.Module):
    """One parameter and a function: ``function(x * weight)`` summed to a loss, for [B, S] float inputs."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.weight).square().mean()


def ids(b: int = 3, s: int = 5) -> dict[str, Tensor]:
    return {"ids": torch.randint(0, 11, (b, s))}

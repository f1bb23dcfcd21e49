"""Chains of strategies in which every ordered pair meets: each pair is two consecutive blocks of one model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hgc.passes.sharding.search.space import strategies
from hgc.strategy import Strategy

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 32, 16, 8, 16, 8


class Layer(nn.Module):
    """Attention alone: few parameters, which take long to gather, but all that exchanges positions, heads and features."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (part(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Chain(nn.Module):
    """A language model of so many layers; embedding and loss are blocks of their own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.table(input_ids)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def chain(layers: int) -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (2, ROWS, LENGTH))
    return Chain(layers), {"input_ids": ids[0], "labels": ids[1]}


def every_strategy(devices: int) -> list[Strategy]:
    """All meshes, each with ZeRO 0 and 3, sequence parallelism or not, full recomputation or not."""
    return [found for found in strategies(devices) if found.zero in (0, 3) and found.recompute != "selective"]


def every_layout(devices: int) -> list[Strategy]:
    """Strategies that place activations differently; ZeRO and recomputation in turn, so that each meets others."""
    plain = [found for found in every_strategy(devices) if found.zero == 0 and found.recompute == "none"]
    turns = itertools.cycle([(0, "none"), (3, "none"), (0, "full"), (3, "full"), (3, "none")])
    made = []
    for found, (zero, recompute) in zip(plain, turns, strict=False):
        shares_data = math.prod((found.dp, found.cp, found.sp)) > 1
        made.append(replace(found, zero=zero if shares_data else 0, recompute=recompute))
    return made


def chains(found: Sequence[Strategy], longest: int) -> Iterator[list[Strategy]]:
    """Walks through the complete directed graph over the strategies that use each of its edges once, cut into pieces."""
    circuit = _circuit(len(found))
    for start in range(0, len(circuit) - 1, longest - 1):
        yield [found[index] for index in circuit[start : start + longest]]


def _circuit(count: int) -> list[int]:
    """An Eulerian circuit of the complete directed graph (Hierholzer's algorithm)."""
    unused = [[other for other in range(count) if other != node] for node in range(count)]
    stack, circuit = [0], list[int]()
    while stack:
        if unused[stack[-1]]:
            stack.append(unused[stack[-1]].pop())
        else:
            circuit.append(stack.pop())
    return circuit[::-1]

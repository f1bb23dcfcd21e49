"""Small models under several plans: the programs on which the verifier is tried."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hgc.compiler import distribute
from hgc.ir.program import Program
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tracing import trace

WIDTH, VOCABULARY, LENGTH, BATCH = 16, 32, 8, 8
PLANS = ("dp2", "tp2", "tp2 no-sequence-parallel", "dp2 tp2", "dp2 tp2 no-sequence-parallel", "dp2 tp2 no-vocab-parallel")

Batch = dict[str, Tensor]


class Feedforward(nn.Module):
    """A residual around a norm and two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """A residual around causal attention with a fused projection."""

    def __init__(self, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, c // self.heads).transpose(1, 2) for y in self.qkv(self.norm(x)).split(c, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(b, t, c))


class GatedMixing(nn.Module):
    """Tokens are mixed along the sequence, a fused projection is cut by slices, and something is dropped."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.both, self.out = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.both(self.norm(x + 0.1 * torch.cumsum(x, 1)))
        return x + F.dropout(self.out(F.silu(y[..., : 2 * WIDTH]) * y[..., 2 * WIDTH :]), 0.1)


class LanguageModel(nn.Module):
    """Token and position tables, blocks, a head and a cross entropy that ignores some labels."""

    def __init__(self, *blocks: Callable[[], nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), labels.flatten())


def embedding() -> nn.Module:
    return LanguageModel()


def feedforward() -> nn.Module:
    return LanguageModel(Feedforward, Feedforward)


def transformer() -> nn.Module:
    return LanguageModel(Attention, Feedforward, Attention, Feedforward, tied=True)


def mixer() -> nn.Module:
    return LanguageModel(GatedMixing, Attention)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "embedding": embedding,
    "feedforward": feedforward,
    "transformer": transformer,
    "mixer": mixer,
}


def batch() -> Batch:
    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator) for _ in range(2))
    labels[0, :3] = -100
    return {"ids": ids, "labels": labels}


@cache
def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


@cache
def traced(name: str) -> Program:
    return trace(model(name), batch())


@cache
def lowered(name: str, plan: str) -> Program:
    """Verified after each axis; callers change copies only."""
    return distribute(traced(name), Plan(Strategy.parse(plan)))

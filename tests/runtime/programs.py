"""A small model and the programs that a compiler would emit for it: tied and padded vocabulary, fused qkv, frozen and unused parameters."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc import runtime as rt
from hgc.runtime import ops

VOCAB, WIDTH, HEADS, LAYERS = 13, 8, 4, 3


class ReferenceLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Reference(nn.Module):
    """Single-device model; returns the loss."""

    positions: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([ReferenceLayer() for _ in range(LAYERS)])
        self.scale = nn.Parameter(torch.ones(()))
        self.frozen = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(5))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("positions", torch.sin(torch.arange(32)[:, None] * torch.arange(1, WIDTH + 1) / WIDTH), persistent=False)
        self.register_buffer("version", torch.tensor(3))

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions[: input_ids.size(1)].to(self.embed.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(x * self.frozen) * self.scale
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Embeddings(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("embed.weight", (VOCAB, WIDTH), pad_to=(16, WIDTH), tp="S(0)")
        self.buffer("positions", (32, WIDTH), persistent=False)
        self.buffer("version", (), torch.int64)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = ops.all_reduce(ops.vocab_embedding(self.embed.weight, input_ids, "tp"), "tp")
        return x + self.positions[: input_ids.size(1)]


class Layer(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("norm.weight", (WIDTH,))
        self.parameter("norm.bias", (WIDTH,))
        self.parameter("mlp.0.weight", (2 * WIDTH, WIDTH), tp="S(0)")
        self.parameter("mlp.0.bias", (2 * WIDTH,), tp="S(0)")
        self.parameter("mlp.2.weight", (WIDTH, 2 * WIDTH), tp="S(1)")
        self.parameter("mlp.2.bias", (WIDTH,))
        self.parameter("qkv.weight", (3 * WIDTH, WIDTH), tp="S(0,3)")
        self.parameter("out.weight", (WIDTH, WIDTH), tp="S(1)")
        self.parameter("out.bias", (WIDTH,))

    def forward(self, x: Tensor) -> Tensor:
        h = ops.copy_in(F.layer_norm(x, (WIDTH,), self.norm.weight, self.norm.bias), "tp")
        heads = HEADS // ops.axis_size("tp")
        q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in F.linear(h, self.qkv.weight).chunk(3, -1))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + ops.all_reduce(F.linear(h, self.out.weight), "tp") + self.out.bias
        h = F.gelu(F.linear(ops.copy_in(x, "tp"), self.mlp[0].weight, self.mlp[0].bias))
        return x + ops.all_reduce(F.linear(h, self.mlp[2].weight), "tp") + self.mlp[2].bias


class Head(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("head.weight", (VOCAB, WIDTH), pad_to=(16, WIDTH), tp="S(0)")
        self.parameter("scale", (), init=1.0)
        self.parameter("frozen", (WIDTH,), requires_grad=False)
        self.parameter("unused", (5,))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = F.linear(ops.copy_in(x * self.frozen, "tp"), self.head.weight) * ops.copy_in(self.scale, "tp")
        loss = ops.cross_entropy(logits.flatten(0, 1), labels.flatten(), vocab_axis="tp", batch_axes=("dp",), vocab_size=VOCAB)
        return ops.all_reduce(loss, "dp")


class Model(rt.Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = Embeddings()
        self.layers = rt.blocks("layers.{}", [Layer] * LAYERS)
        self.head = Head()

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x, labels)


def plan(dp: int = 1, tp: int = 1, zero: int = 0) -> rt.PlanInfo:
    ids = rt.Input(("B", "S"), torch.int64, {"dp": "S(0)"}, high=VOCAB)
    return rt.PlanInfo(
        mesh={"dp": dp, "tp": tp},
        symbols={"B": rt.Symbol("batch", 1, None, 8), "S": rt.Symbol("sequence", 2, 32, 6)},
        inputs={"input_ids": ids, "labels": ids},
        zero=zero,
        data_axes=("dp",),
        tied={"head.weight": "embed.weight"},
    )


def reference(dtype: torch.dtype = torch.float64) -> Reference:
    torch.manual_seed(0)
    return Reference().to(dtype)


def whole_state(model: Reference) -> dict[str, Tensor]:
    """What a compiler hands to the runtime: state dict and constants."""
    return {**model.state_dict(), "positions": model.positions}


def batch(step: int, rows: int = 8, length: int = 6) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randint(0, VOCAB, (rows, length), generator=generator) for name in ("input_ids", "labels")}

"""Models of the zoo that are written in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Fused query, key and value projection, as in nanoGPT."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.heads = heads
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in self.qkv(x).split(width, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0, is_causal=True)
        return self.proj(y.transpose(1, 2).contiguous().view(batch, length, width))  # type: ignore[no-any-return]


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = CausalAttention(width, heads, dropout)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class NanoGPT(nn.Module):
    """A language model without any library: learned positions, tied or untied head, loss outside."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, dropout: float = 0.1, tied: bool = True) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(1024, width)
        self.blocks = nn.ModuleList(NanoBlock(width, heads, dropout) for _ in range(layers))
        self.ln_f = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))  # type: ignore[no-any-return]


def next_token_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of [B, S, V] logits with ``batch["targets"]`` [B, S]."""
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


class TorchEncoder(nn.Module):
    """``nn.TransformerEncoder`` with a classifier for each token."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(ids)))  # type: ignore[no-any-return]


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int, out: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2, self.bn2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut: nn.Module | None = None
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        y = F.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResNet(nn.Module):
    """A residual CNN with in-place activations, as torchvision writes it."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        )
        channels = width
        stages = []
        for stage, depth in enumerate(depths):
            blocks = []
            for block in range(depth):
                inner = width << stage
                blocks.append(Bottleneck(channels, inner, 2 if stage and not block else 1, 4 * inner))
                channels = 4 * inner
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.fc = nn.Linear(channels, classes)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.fc(self.stages(self.stem(pixel_values)).mean((2, 3)))  # type: ignore[no-any-return]


def classification_loss(logits: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """Cross entropy of [B, classes] logits with ``batch["labels"]`` [B]."""
    return F.cross_entropy(logits, batch["labels"])


class Tower(nn.Module):
    """A small encoder that ends in one normalised vector a sequence."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(NanoBlock(width, heads, 0.0) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return F.normalize(self.norm(x).mean(1), dim=-1)


class TwoTower(nn.Module):
    """Contrastive training of two towers of equal structure: each query must find its own document in the batch."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.query = Tower(vocabulary, width, layers, heads)
        self.document = Tower(vocabulary, width, layers, heads)
        self.temperature = nn.Parameter(torch.tensor(2.0))

    def forward(self, query_ids: Tensor, document_ids: Tensor) -> Tensor:
        scores = self.query(query_ids) @ self.document(document_ids).t() * self.temperature.exp()
        return F.cross_entropy(scores, torch.arange(scores.shape[0], device=scores.device))

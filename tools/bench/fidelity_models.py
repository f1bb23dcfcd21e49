"""The model of a published row as an ordinary module: decoder-only transformers of the GPT and Llama kinds, on the meta device.

What a row leaves out comes from ``model_architectures.csv``, and then from :data:`FAMILIES`, which states every assumption once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from hgc.errors import HgcError
from hgc.tools.bench.fidelity_rows import Row, Shape
from hgc.tracing import empty_weights

ROTARY_BASE = 10000.0
"""Of the angles; it changes no cost."""


class NotRebuilt(HgcError):
    """A row from which no model and plan can be made; the sentence says what is missing."""


@dataclass(frozen=True)
class Family:
    """What models of one name have in common. ``vocab``: where no row says it; ``source``: of these facts."""

    words: tuple[str, ...]
    gated: bool
    activation: str
    rms: bool
    rotary: bool
    bias: bool
    tied: bool
    vocab: int
    source: str


FAMILIES = (
    Family(("nemotron",), False, "squared relu", False, True, False, False, 256000, "Nemotron-4 report, arXiv:2402.16819, section 2"),
    Family(("mpt",), False, "gelu", False, False, False, True, 50368, "llm-foundry, scripts/train/yamls/pretrain"),
    Family(("bloom",), False, "gelu", False, False, True, True, 250880, "BLOOM, arXiv:2211.05100; ALiBi costs nothing beside its scores"),
    Family(("internlm",), True, "silu", True, True, False, False, 103168, "InternEvo, configs/7B_sft.py"),
    Family(("llama", "mistral", "qwen"), True, "silu", True, True, False, False, 32000, "Llama 2, arXiv:2307.09288"),
    Family(
        ("gpt", "mcore", "mt-nlg", "megatron"), False, "gelu", False, False, True, True, 51200, "Megatron-LM: GPT-2's 50257 tokens, padded"
    ),
)
"""Looked up in order, by a word in ``arch`` or ``model``. A feed-forward width that is missing is 4 x hidden, where nothing is gated."""


@dataclass(frozen=True)
class Architecture:
    """All that the module needs. ``dropout``: 0 means that none is run; ``flash``: attention in one kernel, else its scores are written."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    positions: int
    gated: bool
    activation: str
    rms: bool
    rotary: bool
    bias: bool
    tied: bool
    dropout: float
    flash: bool


def architecture(
    row: Row, shapes: Mapping[str, Shape], siblings: Sequence[Row], dropout: float, flash: bool
) -> tuple[Architecture, tuple[str, ...]]:
    """The architecture of a row, and a sentence for each thing assumed. Raises :class:`NotRebuilt` if the shape is not known.

    ``siblings``: rows of the same dataset; where a row leaves out its heads, it has those of the nearest one of its width.
    """
    shape, family = shapes.get(row.arch), family_of(row)
    if shape is not None and shape.n_experts:
        raise NotRebuilt("it is a mixture of experts")
    known = {name: _stated(row, shape, name) for name in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")}
    length = row.seq_len or (shape.seq_len_default if shape is not None else None)
    missing = [name for name in ("layers", "hidden") if not known[name]] + ([] if length else ["seq_len"])
    gated = bool(shape.gated_mlp) if shape is not None and shape.gated_mlp is not None else family.gated
    missing += ["ffn"] if gated and not known["ffn"] else []
    if missing or not length:
        raise NotRebuilt(f"the source does not state {', '.join(missing)}")
    layers, hidden = known["layers"] or 0, known["hidden"] or 0
    heads, said = (known["heads"] or 0, "") if known["heads"] else _usual_heads(row, hidden, siblings)
    head_dim = shape.head_dim if shape is not None and shape.head_dim else hidden // heads
    notes = [
        said,
        "" if row.seq_len else f"the sequence length is not stated, {length} assumed, usual for {row.arch}",
        "" if known["ffn"] else "ffn is not stated, 4 x hidden assumed",
        "" if known["vocab"] else f"vocab is not stated, {family.vocab} assumed ({family.source})",
    ]
    tied = family.tied if shape is None or shape.tied_embeddings is None else bool(shape.tied_embeddings)
    made = Architecture(
        *(layers, hidden, heads, known["kv_heads"] or heads, head_dim, known["ffn"] or 4 * hidden, known["vocab"] or family.vocab, length),
        *(gated, family.activation, family.rms, family.rotary, family.bias, tied, dropout, flash),
    )
    return made, tuple(note for note in notes if note)


def _stated(row: Row, shape: Shape | None, name: str) -> int | None:
    found: int | None = getattr(row, name)
    return found if found is not None or shape is None else getattr(shape, name)


def family_of(row: Row) -> Family:
    """By name; raises :class:`NotRebuilt` if it is none of ours."""
    name = f"{row.arch} {row.model}".lower()
    if "moe" in name or (row.ep or 1) > 1:
        raise NotRebuilt("it is a mixture of experts")
    if any(word in name for word in ("nemotron-h", "nemotron v3", "mamba")):
        raise NotRebuilt("it mixes attention with state-space layers, which no row describes")
    for family in FAMILIES:
        if any(word in name for word in family.words):
            return family
    raise NotRebuilt(f"the model {row.model!r} is of no known family")


def _usual_heads(row: Row, hidden: int, siblings: Sequence[Row]) -> tuple[int, str]:
    """Heads of a row that does not state them, and the sentence that says so."""
    alike = [other for other in siblings if other.dataset == row.dataset and other.hidden == hidden and other.heads]
    if alike:
        nearest = min(alike, key=lambda other: abs((other.layers or 0) - (row.layers or 0)))
        heads = nearest.heads or 1
        return heads, f"heads are not stated, {heads} assumed as in {nearest.id}"
    tp = row.tp or 1
    options = [heads for heads in range(tp, hidden // 16 + 1, tp) if hidden % heads == 0 and hidden // heads % 2 == 0]
    if not options:
        raise NotRebuilt(f"the source does not state heads, and no number of heads fits hidden {hidden} and tp {tp}")
    heads = min(options, key=lambda heads: abs(hidden / heads - 128))
    return heads, f"heads are not stated, {heads} assumed: nearest to 128 channels each"


def build(found: Architecture, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """The module with its parameters on the meta device, in training mode; ``forward(input_ids, labels)`` returns the loss."""
    with empty_weights():
        return Decoder(found).to(dtype)


def example(batch: int, length: int) -> dict[str, Tensor]:
    """A batch of that many sequences, without values."""
    ids = torch.empty(batch, length, dtype=torch.int64, device="meta")
    return {"input_ids": ids, "labels": ids}


class Attention(nn.Module):
    """Causal attention; one product makes each group of query heads and the key and value head that they share, side by side."""

    frequencies: Tensor

    def __init__(self, found: Architecture) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.width = found.heads, found.kv_heads, found.head_dim
        self.flash, self.rotary, self.dropout = found.flash, found.rotary, found.dropout
        self.joint = nn.Linear(found.hidden, (found.heads + 2 * found.kv_heads) * found.head_dim, found.bias)
        self.out = nn.Linear(found.heads * found.head_dim, found.hidden, found.bias)
        if found.rotary:
            steps = torch.arange(0, found.head_dim, 2, dtype=torch.float32) / found.head_dim
            self.register_buffer("frequencies", ROTARY_BASE**-steps, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        group = self.heads // self.kv_heads
        grouped = self.joint(x).reshape(x.shape[0], x.shape[1], self.kv_heads, group + 2, self.width)
        parts = grouped.split([group, 1, 1], dim=3)
        q, k, v = (part.reshape(x.shape[0], x.shape[1], -1, self.width).transpose(1, 2) for part in parts)
        if self.rotary:
            angles = torch.arange(x.shape[1])[:, None] * self.frequencies
            cos, sin = (torch.cat((wave, wave), -1).to(x.dtype) for wave in (angles.cos(), angles.sin()))
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if self.flash:
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        else:
            mixed = self.written_out(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))  # type: ignore[no-any-return]

    def written_out(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As before flash attention; the kernel of the softmax applies the causal mask while it reads, so no operator stands for it."""
        shares = torch.softmax(torch.matmul(q, k.transpose(2, 3)) * self.width**-0.5, -1)
        if self.dropout:
            shares = functional.dropout(shares, self.dropout)
        return torch.matmul(shares, v)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of [B, H, S, D]."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class FeedForward(nn.Module):
    """Two products; the first is twice as wide where its one half gates the other."""

    def __init__(self, found: Architecture) -> None:
        super().__init__()
        self.activation = found.activation
        self.gated = found.gated
        self.up = nn.Linear(found.hidden, (2 if found.gated else 1) * found.ffn, found.bias)
        self.down = nn.Linear(found.ffn, found.hidden, found.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.up(x)
        if self.gated:
            gate, rest = wide.chunk(2, -1)
            return self.down(functional.silu(gate) * rest)  # type: ignore[no-any-return]
        active = functional.gelu(wide, approximate="tanh") if self.activation == "gelu" else functional.relu(wide) * functional.relu(wide)
        return self.down(active)  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self, found: Architecture) -> None:
        super().__init__()
        self.dropout = found.dropout
        self.attention_norm, self.attention = norm(found), Attention(found)
        self.feed_forward_norm, self.feed_forward = norm(found), FeedForward(found)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropped(self.attention(self.attention_norm(x)))
        return x + self.dropped(self.feed_forward(self.feed_forward_norm(x)))

    def dropped(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.dropout else x


def norm(found: Architecture) -> nn.Module:
    return nn.RMSNorm(found.hidden, eps=1e-5) if found.rms else nn.LayerNorm(found.hidden)


class Decoder(nn.Module):
    """Embedding, layers, norm, output product and cross entropy in float32."""

    def __init__(self, found: Architecture) -> None:
        super().__init__()
        self.words = nn.Embedding(found.vocab, found.hidden)
        self.positions = None if found.rotary else nn.Embedding(found.positions, found.hidden)
        self.layers = nn.ModuleList(Layer(found) for _ in range(found.layers))
        self.norm = norm(found)
        self.head = nn.Linear(found.hidden, found.vocab, bias=False)
        self.dropout = found.dropout
        if found.tied:
            self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(input_ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(input_ids.shape[1]))
        if self.dropout:
            x = functional.dropout(x, self.dropout)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x)).float()
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

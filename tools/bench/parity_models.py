"""Small models for ``hgc bench parity``: families with sizes to draw from, and the zoo."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgc.tools.bench import zoo

Batch = dict[str, Any]
Sizes = Mapping[str, int]
LONGEST = 64
"""Positions of models that have a table of them."""


@dataclass(frozen=True)
class Family:
    """``build(sizes)`` is a model in training mode, ``batch(sizes, rows, length)`` fits it.

    ``sizes``: what cases draw, small ones first. ``drops``: the model has dropout.
    """

    build: Callable[[Sizes], nn.Module]
    batch: Callable[[Sizes, int, int], Batch]
    sizes: Mapping[str, tuple[int, ...]]
    drops: bool = False


def _ids(sizes: Sizes, rows: int, length: int) -> Tensor:
    return torch.randint(0, sizes["vocabulary"], (rows, length))


def _language(sizes: Sizes, rows: int, length: int) -> Batch:
    return {"input_ids": _ids(sizes, rows, length), "labels": _ids(sizes, rows, length)}


def _sequences(sizes: Sizes, rows: int, length: int) -> Batch:
    return {"input_ids": _ids(sizes, rows, length), "labels": _ids(sizes, rows, max(2, length // 2))}


def _llama(s: Sizes) -> nn.Module:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=s["heads"] * s["head_dim"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["heads"] // s["shared"],
        head_dim=s["head_dim"],
        intermediate_size=s["ffn"],
        vocab_size=s["vocabulary"],
        tie_word_embeddings=bool(s["tied"]),
    )
    return transformers.LlamaForCausalLM(config).train()  # type: ignore[no-any-return]


def _gpt2(s: Sizes) -> nn.Module:
    import transformers

    config = transformers.GPT2Config(
        n_embd=s["heads"] * s["head_dim"],
        n_layer=s["layers"],
        n_head=s["heads"],
        n_inner=s["ffn"],
        n_positions=LONGEST,
        vocab_size=s["vocabulary"],
        tie_word_embeddings=bool(s["tied"]),
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config).train()  # type: ignore[no-any-return]


def _bert(s: Sizes) -> nn.Module:
    import transformers

    config = transformers.BertConfig(
        hidden_size=s["heads"] * s["head_dim"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        intermediate_size=s["ffn"],
        vocab_size=s["vocabulary"],
        max_position_embeddings=LONGEST,
        tie_word_embeddings=bool(s["tied"]),
    )
    return transformers.BertForMaskedLM(config).train()  # type: ignore[no-any-return]


def _t5(s: Sizes) -> nn.Module:
    import transformers

    config = transformers.T5Config(
        d_model=s["heads"] * s["head_dim"],
        num_layers=s["layers"],
        num_heads=s["heads"],
        d_kv=s["head_dim"],
        d_ff=s["ffn"],
        vocab_size=s["vocabulary"],
        tie_word_embeddings=bool(s["tied"]),
        decoder_start_token_id=0,
    )
    return transformers.T5ForConditionalGeneration(config).train()  # type: ignore[no-any-return]


_TRANSFORMER = {
    "heads": (1, 2, 3, 4, 6, 8),
    "head_dim": (4, 8, 12),
    "layers": (1, 2, 3),
    "ffn": (17, 24, 32, 48, 64),
    "vocabulary": (31, 64, 97, 128),
    "tied": (0, 1),
}
MODELS: dict[str, Family] = {
    "llama": Family(_llama, _language, {**_TRANSFORMER, "shared": (1, 2)}),
    "gpt2": Family(_gpt2, _language, _TRANSFORMER, drops=True),
    "bert": Family(_bert, _language, _TRANSFORMER, drops=True),
    "t5": Family(_t5, _sequences, _TRANSFORMER, drops=True),
}
SKIPPED = {
    "Mamba-2": "takes 15 s to trace",
    "Qwen2-VL": "refused (hgc bench trace says why)",
    "Swin": "draws numbers in training (stochastic depth)",
}
"""Zoo entries that take no part, and why."""
EXPERTS = ("Switch", "Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS")
"""Zoo entries where rounding in float32 could send a token to another expert."""
WHOLE_BATCH = ("Residual CNN", "CLIP", "Two towers", "Switch", "Mixtral")
"""Zoo entries whose loss is no mean of the losses of parts of the batch: statistics, contrasts, balance of experts."""


def zoo_names() -> list[str]:
    """The zoo entries that take part."""
    return [entry.name for entry in zoo.entries() if entry.name not in SKIPPED]

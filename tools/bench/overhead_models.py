"""What ``hgc bench overhead`` trains: two Hugging Face models whose step takes a few hundred milliseconds on two CPU cores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Size:
    """Sizes of a model and of its *global* batch ``[rows, length]``. Heads, key heads and rows divide by four."""

    hidden: int = 256
    layers: int = 4
    heads: int = 8
    vocabulary: int = 4096
    rows: int = 8
    length: int = 128


def llama(size: Size) -> nn.Module:
    """Grouped-query Llama, untied."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.heads // 2,
        max_position_embeddings=2 * size.length,
        use_cache=False,
    )
    return _seeded(lambda: transformers.LlamaForCausalLM(config))


def gpt2(size: Size) -> nn.Module:
    """GPT-2 with tied embeddings; no dropout, because two programs would draw different masks."""
    import transformers

    config = transformers.GPT2Config(
        vocab_size=size.vocabulary,
        n_embd=size.hidden,
        n_layer=size.layers,
        n_head=size.heads,
        n_positions=2 * size.length,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    return _seeded(lambda: transformers.GPT2LMHeadModel(config))


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().train()


MODELS: dict[str, Callable[[Size], nn.Module]] = {"Llama": llama, "GPT-2": gpt2}


def global_batch(size: Size, step: int) -> Batch:
    """The batch of one step, ``[rows, length]`` token ids that are also the labels; alike in every process."""
    generator = torch.Generator().manual_seed(1_000 + step)
    ids = torch.randint(0, size.vocabulary, (size.rows, size.length), generator=generator)
    return {"input_ids": ids, "labels": ids.clone()}

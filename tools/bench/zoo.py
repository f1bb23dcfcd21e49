"""The model zoo: thirty families built from their configs, without downloads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hgc.tools.bench import zoo_modules as own

Batch = dict[str, Any]
Loss = Callable[[Any, dict[str, Any]], Tensor]

_VOCABULARY = 96


@dataclass(frozen=True)
class ZooEntry:
    """``build("small")`` has random weights and runs in milliseconds, ``build("full")`` is the published size; ``batch(b, s)`` fits both.

    ``minimum`` is the smallest sequence that ``batch`` can make, ``step`` what sequences must differ by; ``sequence`` tells whether
    the model has one.
    """

    name: str
    build: Callable[[str], nn.Module]
    batch: Callable[[int, int], Batch]
    loss: Loss | None = None
    minimum: int = 4
    step: int = 1
    sequence: bool = True


def entries() -> list[ZooEntry]:
    """All families, Hugging Face ones first. Needs transformers."""
    return [*_language(), *_sequence_to_sequence(), *_vision(), *_mixtures(), *_plain()]


def find(name: str) -> ZooEntry:
    return {entry.name: entry for entry in entries()}[name]


def _ids(b: int, s: int) -> Tensor:
    return torch.randint(0, _VOCABULARY, (b, s))


def _lm(b: int, s: int) -> Batch:
    return {"input_ids": _ids(b, s), "labels": _ids(b, s)}


def _lm_padded(b: int, s: int) -> Batch:
    mask = torch.ones(b, s, dtype=torch.int64)
    mask[-1, s - s // 4 :] = 0
    return {**_lm(b, s), "attention_mask": mask}


def _seq2seq(b: int, s: int) -> Batch:
    return {"input_ids": _ids(b, s), "labels": _ids(b, s // 2 + 3)}


def _seq2seq_masked(b: int, s: int) -> Batch:
    return {**_seq2seq(b, s), "attention_mask": torch.ones(b, s, dtype=torch.int64)}


def _images(b: int, size: int) -> Tensor:
    return torch.rand(b, 3, size, size)


def _labelled_images(size: int) -> Callable[[int, int], Batch]:
    return lambda b, s: {"pixel_values": _images(b, size), "labels": torch.randint(0, 10, (b,))}


def _hf(
    model: str, config: str, small: Mapping[str, Any], full: Mapping[str, Any] | None = None, **common: Any
) -> Callable[[str], nn.Module]:
    """A builder of a transformers model; ``small`` replaces entries of the config, which by default is the published one."""

    def build(size: str) -> nn.Module:
        import transformers

        settings = {**common, **(small if size == "small" else full or {})}
        made = getattr(transformers, model)(getattr(transformers, config)(**settings))
        assert isinstance(made, nn.Module)
        return made.train()

    return build


_SMALL = {"vocab_size": _VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96}
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GROUPED = {**_SMALL, "num_key_value_heads": 2, **_TOKENS}


def _language() -> list[ZooEntry]:
    llama = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    llama = {**llama, "intermediate_size": 14336, "vocab_size": 128256}
    gemma = {**_GROUPED, "head_dim": 16}
    local = {**gemma, "num_hidden_layers": 6, "sliding_window": 5}
    return [
        ZooEntry("GPT-2", _hf("GPT2LMHeadModel", "GPT2Config", {"vocab_size": _VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4}), _lm),
        ZooEntry("GPT-NeoX", _hf("GPTNeoXForCausalLM", "GPTNeoXConfig", _SMALL), _lm),
        ZooEntry("OPT", _hf("OPTForCausalLM", "OPTConfig", {**_SMALL, **_TOKENS, "ffn_dim": 96, "word_embed_proj_dim": 64}), _lm),
        ZooEntry("Llama", _hf("LlamaForCausalLM", "LlamaConfig", _GROUPED, llama), _lm),
        ZooEntry("Llama, padded", _hf("LlamaForCausalLM", "LlamaConfig", _GROUPED, llama), _lm_padded),
        ZooEntry("Qwen3", _hf("Qwen3ForCausalLM", "Qwen3Config", gemma), _lm),
        ZooEntry("Gemma", _hf("GemmaForCausalLM", "GemmaConfig", gemma), _lm),
        ZooEntry("Gemma 2", _hf("Gemma2ForCausalLM", "Gemma2Config", {**local, "query_pre_attn_scalar": 16}), _lm),
        ZooEntry("Gemma 3", _hf("Gemma3ForCausalLM", "Gemma3TextConfig", {**local, "query_pre_attn_scalar": 16}), _lm),
        ZooEntry("Phi", _hf("PhiForCausalLM", "PhiConfig", _GROUPED), _lm),
        ZooEntry("Phi-3", _hf("Phi3ForCausalLM", "Phi3Config", _GROUPED, resid_pdrop=0.1), _lm),
        ZooEntry("BERT", _hf("BertForMaskedLM", "BertConfig", _SMALL), _lm_padded),
        ZooEntry("RoBERTa", _hf("RobertaForMaskedLM", "RobertaConfig", {**_SMALL, **_TOKENS, "max_position_embeddings": 80}), _lm),
        ZooEntry("ALBERT", _hf("AlbertForMaskedLM", "AlbertConfig", {**_SMALL, "embedding_size": 16}), _lm),
        ZooEntry("Mamba-2", _hf("Mamba2ForCausalLM", "Mamba2Config", _MAMBA, vocab_size=_VOCABULARY), _lm, minimum=8, step=8),
    ]


_MAMBA = {"hidden_size": 64, "num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2, "chunk_size": 8}


def _sequence_to_sequence() -> list[ZooEntry]:
    t5 = {"vocab_size": _VOCABULARY, "d_model": 64, "num_layers": 3, "num_heads": 4, "d_kv": 16, "d_ff": 96}
    switch = {
        **t5,
        "num_layers": 4,
        "num_decoder_layers": 4,
        "num_sparse_encoder_layers": 2,
        "num_sparse_decoder_layers": 2,
        "num_experts": 4,
        "router_jitter_noise": 0.0,
    }
    whisper = {
        "vocab_size": _VOCABULARY,
        "d_model": 64,
        "encoder_layers": 3,
        "decoder_layers": 3,
        "num_mel_bins": 16,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 96,
        "decoder_ffn_dim": 96,
        "max_source_positions": 32,
        "max_target_positions": 80,
        "decoder_start_token_id": 1,
        **_TOKENS,
    }

    def speech(b: int, s: int) -> Batch:
        return {"input_features": torch.randn(b, 16, 64), "labels": _ids(b, s)}

    return [
        ZooEntry("T5", _hf("T5ForConditionalGeneration", "T5Config", t5, decoder_start_token_id=0), _seq2seq),
        ZooEntry(
            "Switch",
            _hf("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", switch, decoder_start_token_id=0),
            _seq2seq_masked,
        ),
        ZooEntry("Whisper", _hf("WhisperForConditionalGeneration", "WhisperConfig", whisper), speech),
    ]


def _vision() -> list[ZooEntry]:
    classes: Mapping[str, Any] = {"num_labels": 10, "problem_type": "single_label_classification"}
    vit = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 96, "image_size": 32, "patch_size": 8}
    swin = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2, 4], "num_heads": [2, 2, 4], "window_size": 4}
    text = {**_SMALL, **_TOKENS, "max_position_embeddings": 80}
    clip = {"text_config": text, "vision_config": vit, "projection_dim": 32}

    def captions(b: int, s: int) -> Batch:
        return {"input_ids": _ids(b, s), "pixel_values": _images(b, 32), "return_loss": True}

    return [
        ZooEntry("ViT", _hf("ViTForImageClassification", "ViTConfig", vit, **classes), _labelled_images(32), sequence=False),
        ZooEntry("Swin", _hf("SwinForImageClassification", "SwinConfig", swin, **classes), _labelled_images(32), sequence=False),
        ZooEntry("CLIP", _hf("CLIPModel", "CLIPConfig", clip), captions),
        ZooEntry("LLaVA", _llava(vit), _images_in_text, minimum=24),
        ZooEntry("Qwen2-VL", _qwen2_vl(), _patches_in_text, minimum=24),
    ]


_IMAGE_TOKEN = _VOCABULARY - 1


def _llava(vision: Mapping[str, Any]) -> Callable[[str], nn.Module]:
    def build(size: str) -> nn.Module:
        import transformers

        config = transformers.LlavaConfig(
            vision_config=transformers.CLIPVisionConfig(**(vision if size == "small" else {})),
            text_config=transformers.LlamaConfig(**(_GROUPED if size == "small" else {})),
            image_token_index=_IMAGE_TOKEN,
        )
        return transformers.LlavaForConditionalGeneration(config).train()  # type: ignore[no-any-return]

    return build


def _with_image_tokens(b: int, s: int, count: int) -> Batch:
    ids = torch.randint(3, _IMAGE_TOKEN, (b, s))
    ids[:, 1 : 1 + count] = _IMAGE_TOKEN
    return {"input_ids": ids, "labels": ids.clone()}


def _images_in_text(b: int, s: int) -> Batch:
    return {**_with_image_tokens(b, s, 16), "pixel_values": _images(b, 32)}


def _qwen2_vl() -> Callable[[str], nn.Module]:
    def build(size: str) -> nn.Module:
        import transformers

        vision = {"depth": 3, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4, "in_channels": 3}
        text = {**_GROUPED, "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
        config = transformers.Qwen2VLConfig(
            vision_config=vision if size == "small" else {},
            text_config=text if size == "small" else {},
            image_token_id=_IMAGE_TOKEN,
            vision_start_token_id=3,
            vision_end_token_id=4,
            video_token_id=5,
        )
        return transformers.Qwen2VLForConditionalGeneration(config).train()  # type: ignore[no-any-return]

    return build


def _patches_in_text(b: int, s: int) -> Batch:
    """One image of 8 x 8 patches a row: 64 rows of pixels, 16 tokens after merging two by two."""
    grid = torch.tensor([[1, 8, 8]] * b)
    return {**_with_image_tokens(b, s, 16), "pixel_values": torch.rand(b * 64, 3 * 2 * 4 * 4), "image_grid_thw": grid}


def _mixtures() -> list[ZooEntry]:
    qwen = {**_GROUPED, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    deepseek = {
        **_GROUPED,
        "num_key_value_heads": 4,
        "num_hidden_layers": 5,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    }
    gpt_oss = {**_GROUPED, "num_hidden_layers": 6, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
    return [
        ZooEntry("Mixtral", _hf("MixtralForCausalLM", "MixtralConfig", {**_GROUPED, "num_local_experts": 4}), _lm),
        ZooEntry("Qwen3-MoE", _hf("Qwen3MoeForCausalLM", "Qwen3MoeConfig", qwen), _lm),
        ZooEntry("DeepSeek-V3", _hf("DeepseekV3ForCausalLM", "DeepseekV3Config", deepseek), _lm),
        ZooEntry("GPT-OSS", _hf("GptOssForCausalLM", "GptOssConfig", gpt_oss), _lm),
    ]


def _plain() -> list[ZooEntry]:
    def tokens(b: int, s: int) -> Batch:
        return {"ids": _ids(b, s), "targets": _ids(b, s)}

    def pairs(b: int, s: int) -> Batch:
        return {"query_ids": _ids(b, s), "document_ids": _ids(b, 2 * s)}

    def sized(small: Callable[[], nn.Module], full: Callable[[], nn.Module]) -> Callable[[str], nn.Module]:
        return lambda size: small() if size == "small" else full()

    nano = sized(lambda: own.NanoGPT(_VOCABULARY, 64, 3, 4), lambda: own.NanoGPT(50304, 768, 12, 12))
    untied = sized(lambda: own.NanoGPT(_VOCABULARY, 64, 3, 4, tied=False), lambda: own.NanoGPT(50304, 768, 12, 12, tied=False))
    encoder = sized(lambda: own.TorchEncoder(_VOCABULARY, 64, 3, 4), lambda: own.TorchEncoder(30000, 512, 6, 8))
    cnn = sized(lambda: own.ResNet(8, (3, 4), 10), lambda: own.ResNet(64, (3, 4, 6, 3), 1000))
    towers = sized(lambda: own.TwoTower(_VOCABULARY, 64, 3, 4), lambda: own.TwoTower(30000, 512, 6, 8))
    return [
        ZooEntry("nanoGPT, tied weights", nano, tokens, own.next_token_loss),
        ZooEntry("nanoGPT", untied, tokens, own.next_token_loss),
        ZooEntry("nn.TransformerEncoder", encoder, tokens, own.next_token_loss),
        ZooEntry("Residual CNN", cnn, _labelled_images(64), own.classification_loss, sequence=False),
        ZooEntry("Two towers", towers, pairs),
    ]

"""Example batches: the model of a config takes them and returns its loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hgc.errors import HgcError
from hgc.tools import hugging_face

transformers = pytest.importorskip("transformers")

TEXT = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64}
IMAGE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 32, "patch_size": 16}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1, "vocab_size": 64, "decoder_start_token_id": 0}
SPEECH = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "num_mel_bins": 8}
SPEECH |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
SPEECH |= {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_source_positions": 16, "max_target_positions": 64, "vocab_size": 64}
SPEECH |= {"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0, "decoder_start_token_id": 0}

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("LlamaForCausalLM", "llama", TEXT),
    ("GPT2LMHeadModel", "gpt2", {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 64}),
    ("BertForMaskedLM", "bert", TEXT),
    ("BertForSequenceClassification", "bert", TEXT),
    ("BertForTokenClassification", "bert", TEXT),
    ("BertForQuestionAnswering", "bert", TEXT),
    ("T5ForConditionalGeneration", "t5", T5),
    ("ViTForImageClassification", "vit", IMAGE),
    ("WhisperForConditionalGeneration", "whisper", SPEECH),
    ("CLIPModel", "clip", {"text_config": TEXT | {"eos_token_id": 1}, "vision_config": IMAGE, "projection_dim": 16}),
]


@pytest.mark.parametrize(("architecture", "kind", "sizes"), KINDS, ids=[architecture for architecture, *_ in KINDS])
def test_example_batch_gives_a_loss(architecture: str, kind: str, sizes: dict[str, Any]) -> None:
    config = transformers.CONFIG_MAPPING[kind].from_dict(sizes)
    inputs = hugging_face.example_inputs(config, architecture, batch_size=2, sequence_length=8)
    model = getattr(transformers, architecture)(config)
    loss = model(**inputs).loss
    assert loss.shape == ()
    assert torch.isfinite(loss)
    assert all(value.shape[0] == 2 for value in inputs.values() if isinstance(value, torch.Tensor))


def test_batches_are_the_same_each_time() -> None:
    config = transformers.CONFIG_MAPPING["llama"].from_dict(TEXT)
    first, second = (hugging_face.example_inputs(config, "LlamaForCausalLM", 2, 8) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_models_have_no_weights(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "vocab_size": 128256}')
    model, _ = hugging_face.build(str(tmp_path), 2, 8)
    assert type(model).__name__ == "LlamaForCausalLM", "causal language models need no architectures"
    assert all(parameter.is_meta for parameter in model.parameters())


def test_no_architecture_and_no_language_model(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    with pytest.raises(HgcError, match="names no architectures and 'vit' is no causal language model; add architectures"):
        hugging_face.build(str(tmp_path), 2, 8)

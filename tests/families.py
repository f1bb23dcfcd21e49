"""Small models of the families that every strategy must run, with real weights and a batch; built from configs, in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Built = tuple[nn.Module, dict[str, Tensor]]
VOCABULARY = 256


def token_ids(batch: int = 4, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def _language_batch() -> dict[str, Tensor]:
    return {"input_ids": token_ids(seed=1), "labels": token_ids(seed=2)}


def llama(vocabulary: int = VOCABULARY) -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, intermediate_size=128, vocab_size=vocabulary
    )
    return transformers.LlamaForCausalLM(config), _language_batch()


def gpt2(vocabulary: int = VOCABULARY) -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, n_positions=32, vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"
    )
    return transformers.GPT2LMHeadModel(config), _language_batch()


def gpt2_odd_vocabulary() -> Built:
    return gpt2(257)


def bert() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128, vocab_size=VOCABULARY, max_position_embeddings=32
    )
    return transformers.BertForMaskedLM(config), _language_batch()


def t5() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(
        d_model=64, num_layers=3, num_heads=4, d_kv=16, d_ff=128, vocab_size=VOCABULARY, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config), {"input_ids": token_ids(seed=1), "labels": token_ids(4, 8, seed=2)}


def vit() -> Built:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        num_labels=16,
        problem_type="single_label_classification",
    )
    images = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return transformers.ViTForImageClassification(config), {"pixel_values": images, "labels": torch.arange(4)}


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResidualCNN(nn.Module):
    def __init__(self, channels: int = 16, classes: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResidualBlock(channels) for _ in range(3))
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def cnn() -> Built:
    return ResidualCNN(), {"images": torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1)), "labels": torch.arange(4)}


FAMILIES: dict[str, Callable[[], Built]] = {
    "gpt2": gpt2,
    "llama": llama,
    "bert": bert,
    "t5": t5,
    "vit": vit,
    "cnn": cnn,
    "gpt2-odd-vocabulary": gpt2_odd_vocabulary,
}
STRATEGIES = ("dp4", "dp4 zero3", "tp2", "tp4", "dp2 tp2")

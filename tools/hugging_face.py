"""Models from a Hugging Face ``config.json``, without downloads: the class from its ``architectures``, a batch from its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hgc import records
from hgc.errors import HgcError

EXAMPLES = "write a function that returns (model, example_inputs) and give it as module:function"


def read_config(target: str) -> str:
    """The text of a ``config.json``, given its path or its folder."""
    path = Path(target)
    if path.is_dir():
        path = path / "config.json"
    if not path.exists() and "/" in target and not path.suffix:
        raise HgcError(f"hf:{target} is no file here, and hgc downloads nothing; give the path of a config.json")
    return records.read_text(path, "model config", HgcError)


def build(target: str, batch_size: int, sequence_length: int) -> tuple[nn.Module, dict[str, Any]]:
    """Model on meta and example inputs; raises :class:`HgcError` for what is missing or what transformers does not know."""
    config = _config(target, read_config(target))
    model_class = _model_class(target, config)
    from hgc.tracing import empty_weights

    try:
        with empty_weights():
            model = model_class(config)
    except Exception as refused:  # whatever a model's constructor raises, the config is what the user can mend
        raise HgcError(f"hf:{target} cannot be built: {type(refused).__name__}: {refused}; correct the config") from None
    return model, example_inputs(config, model_class.__name__, batch_size, sequence_length)


def _config(target: str, text: str) -> Any:
    content = records.parse_json(text, f"hf:{target}", HgcError)
    kind = content.get("model_type") if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise HgcError(f"hf:{target} has no model_type; give the config.json of a transformers model")
    mapping = _transformers().CONFIG_MAPPING
    if kind not in mapping:
        raise HgcError(
            f"hf:{target} has model_type {kind!r}, which this transformers does not know; {records.suggestion(kind, list(mapping))}"
        )
    try:
        return mapping[kind].from_dict(content)
    except Exception as refused:  # transformers raises validation errors of several libraries
        raise HgcError(f"hf:{target} is refused by transformers: {refused}; correct the config") from None


def _model_class(target: str, config: Any) -> Callable[[Any], nn.Module]:
    transformers = _transformers()
    names = config.architectures or []
    if not names:
        mapping = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        if type(config) not in mapping:
            raise HgcError(f"hf:{target} names no architectures and {config.model_type!r} is no causal language model; add architectures")
        found = mapping[type(config)]
        return found[0] if isinstance(found, tuple) else found  # type: ignore[no-any-return]
    found = getattr(transformers, names[0], None)
    if found is None:
        raise HgcError(
            f"hf:{target} has architecture {names[0]!r}, which this transformers does not know; correct it or upgrade transformers"
        )
    return found  # type: ignore[no-any-return]


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise HgcError("hf: models need the transformers package; run pip install 'hgc[hf]'") from None
    return transformers


def example_inputs(config: Any, architecture: str, batch_size: int, sequence_length: int) -> dict[str, Any]:
    """A batch of the model's kind with labels, so that the model returns its loss; numbers are drawn from a fixed seed."""
    make = _Batch(config, batch_size, sequence_length)
    if "ImageClassification" in architecture:
        return {"pixel_values": make.pixels(), "labels": make.classes()}
    if "SpeechSeq2Seq" in architecture or config.model_type == "whisper":
        return {"input_features": make.mel(), "labels": make.tokens()}
    if config.model_type == "clip":
        return {"input_ids": make.tokens(), "pixel_values": make.pixels(), "return_loss": True}
    if "SequenceClassification" in architecture:
        return {"input_ids": make.tokens(), "labels": make.classes()}
    if "TokenClassification" in architecture:
        return {"input_ids": make.tokens(), "labels": make.numbers((batch_size, sequence_length), config.num_labels)}
    if "QuestionAnswering" in architecture:
        return {"input_ids": make.tokens(), "start_positions": make.places(), "end_positions": make.places()}
    if any(word in architecture for word in ("CausalLM", "MaskedLM", "LMHead", "ConditionalGeneration")) and make.vocabulary:
        return {"input_ids": make.tokens(), "labels": make.tokens()}
    raise HgcError(f"hgc has no example batch for {architecture}; {EXAMPLES}")


class _Batch:
    """Draws the tensors of a batch in the sizes that a config allows."""

    def __init__(self, config: Any, batch_size: int, sequence_length: int) -> None:
        self.config, self.batch_size = config, batch_size
        self.text = getattr(config, "text_config", None) or config
        self.vision = getattr(config, "vision_config", None) or config
        self.vocabulary = int(getattr(self.text, "vocab_size", 0) or 0)
        longest = getattr(self.text, "max_position_embeddings", None) or getattr(self.text, "max_target_positions", None)
        if longest and sequence_length > longest:
            raise HgcError(f"--sequence-length is {sequence_length}, the model's config allows {longest} at most; lower it")
        self.sequence_length = sequence_length
        self.generator = torch.Generator().manual_seed(0)

    def numbers(self, shape: tuple[int, ...], high: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def tokens(self) -> Tensor:
        return self.numbers((self.batch_size, self.sequence_length), self.vocabulary)

    def classes(self) -> Tensor:
        return self.numbers((self.batch_size,), int(self.config.num_labels))

    def places(self) -> Tensor:
        return self.numbers((self.batch_size,), self.sequence_length)

    def pixels(self) -> Tensor:
        size = getattr(self.vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return torch.randn((self.batch_size, int(getattr(self.vision, "num_channels", 3)), height, width), generator=self.generator)

    def mel(self) -> Tensor:
        frames = 2 * int(self.config.max_source_positions)
        return torch.randn((self.batch_size, int(self.config.num_mel_bins), frames), generator=self.generator)

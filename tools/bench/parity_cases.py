"""Random cases for ``hgc bench parity``: a small model, a plan over the whole space, shapes; as one line of text that repeats it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hgc import records
from hgc.errors import HgcError
from hgc.strategy import AXES, Strategy
from hgc.tools.bench import zoo

Batch = dict[str, Any]
MOST_RANKS = 8


@dataclass(frozen=True)
class ParityCase:
    """``model`` is one of :data:`MODELS` with ``sizes``, or ``zoo:NAME``; ``plan`` is a strategy's text; ``batch`` rows of ``length``."""

    model: str
    plan: str
    batch: int
    length: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    micro_batches: int = 1

    def __str__(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> ParityCase:
        """Inverse of ``str``; raises :class:`HgcError` naming what is wrong."""
        content = records.parse_json(text, "the case", HgcError)
        try:
            case = ParityCase(**content)
        except TypeError as wrong:
            raise HgcError(f"the case {text[:60]!r} is none ({wrong}); give one that hgc bench parity has printed") from None
        if case.model not in MODELS and not case.model.startswith("zoo:"):
            raise HgcError(f"the case names the model {case.model!r}; {records.suggestion(case.model, MODELS)}")
        return case

    def build(self) -> tuple[nn.Module, Batch, Callable[..., torch.Tensor] | None]:
        """The model with weights drawn from a fixed seed, a batch, and the loss of models that return none."""
        torch.manual_seed(0)
        if self.model.startswith("zoo:"):
            entry = zoo.find(self.model.removeprefix("zoo:"))
            return entry.build("small"), entry.batch(self.batch, self.length), entry.loss
        build, _ = MODELS[self.model]
        return *build(self), None


# -- models -----------------------------------------------------------------------------------------------------------------------------


def _ids(case: ParityCase) -> torch.Tensor:
    return torch.randint(0, case.sizes["vocabulary"], (case.batch, case.length))


def _language(case: ParityCase) -> Batch:
    return {"input_ids": _ids(case), "labels": _ids(case)}


def _llama(case: ParityCase) -> tuple[nn.Module, Batch]:
    import transformers

    s = case.sizes
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
    return transformers.LlamaForCausalLM(config), _language(case)


def _gpt2(case: ParityCase) -> tuple[nn.Module, Batch]:
    import transformers

    s = case.sizes
    config = transformers.GPT2Config(
        n_embd=s["heads"] * s["head_dim"],
        n_layer=s["layers"],
        n_head=s["heads"],
        n_inner=s["ffn"],
        n_positions=max(64, case.length),
        vocab_size=s["vocabulary"],
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLM",
    )
    return transformers.GPT2LMHeadModel(config), _language(case)


def _bert(case: ParityCase) -> tuple[nn.Module, Batch]:
    import transformers

    s = case.sizes
    config = transformers.BertConfig(
        hidden_size=s["heads"] * s["head_dim"],
        num_hidden_layers=s["layers"],
        num_attention_heads=s["heads"],
        intermediate_size=s["ffn"],
        vocab_size=s["vocabulary"],
        max_position_embeddings=max(64, case.length),
    )
    return transformers.BertForMaskedLM(config), _language(case)


def _t5(case: ParityCase) -> tuple[nn.Module, Batch]:
    import transformers

    s = case.sizes
    config = transformers.T5Config(
        d_model=s["heads"] * s["head_dim"],
        num_layers=s["layers"],
        num_heads=s["heads"],
        d_kv=s["head_dim"],
        d_ff=s["ffn"],
        vocab_size=s["vocabulary"],
        decoder_start_token_id=0,
    )
    labels = torch.randint(0, s["vocabulary"], (case.batch, max(2, case.length // 2)))
    return transformers.T5ForConditionalGeneration(config), {"input_ids": _ids(case), "labels": labels}


_TRANSFORMER = {
    "heads": (1, 2, 3, 4, 6, 8),
    "head_dim": (4, 8, 12),
    "layers": (1, 2, 3),
    "ffn": (17, 24, 32, 48, 64),
    "vocabulary": (31, 64, 97, 128),
}
MODELS: dict[str, tuple[Callable[[ParityCase], tuple[nn.Module, Batch]], dict[str, tuple[int, ...]]]] = {
    "llama": (_llama, {**_TRANSFORMER, "shared": (1, 2), "tied": (0, 1)}),
    "gpt2": (_gpt2, _TRANSFORMER),
    "bert": (_bert, _TRANSFORMER),
    "t5": (_t5, _TRANSFORMER),
}
"""Families with the sizes that cases draw from, small ones first."""
SKIPPED = {
    "Mamba-2": "takes 15 s to trace",
    "Qwen2-VL": "refused (hgc bench trace says why)",
    "Swin": "draws numbers in training (stochastic depth)",
    **dict.fromkeys(("Switch", "Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS"), "rounding decides which expert a token goes to"),
}
"""Zoo entries that take no part, and why."""


# -- drawing and shrinking ----------------------------------------------------------------------------------------------------------------


def draw(seed: int, index: int) -> ParityCase:
    """Case number ``index`` of a seed."""
    dice = random.Random(f"{seed}/{index}")
    plan = _plan(dice)
    dtype = dice.choice(("float32", "float64"))
    micro_batches = dice.choice((1, 1, 1, 2))
    if dice.random() < 0.25:
        entry = dice.choice([each for each in zoo.entries() if each.name not in SKIPPED])
        length = max(entry.minimum, entry.step * dice.randrange(1, 1 + 24 // entry.step))
        return ParityCase(f"zoo:{entry.name}", plan, _batch(dice, plan), length, {}, dtype)
    name = dice.choice(list(MODELS))
    strategy = Strategy.parse(plan)
    sizes = {size: dice.choice(values) for size, values in MODELS[name][1].items()}
    fitting = [heads for heads in MODELS[name][1]["heads"] if heads % (strategy.tp * strategy.sp) == 0]
    if fitting and dice.random() < 0.9:  # the others must be refused
        sizes["heads"] = dice.choice(fitting)
    if sizes["heads"] % (sizes.get("shared", 1) * strategy.tp * strategy.sp):
        sizes["shared"] = 1
    length = dice.randrange(2, 25)
    if dice.random() < 0.9:  # mostly lengths that the plan can split; the others must be refused, not run wrongly
        parts = strategy.cp * strategy.sp * strategy.tp * (2 if strategy.cp > 1 else 1)
        length = max(1, round(length / parts)) * parts
    kept = {size: value for size, value in sizes.items() if size in MODELS[name][1]}
    return ParityCase(name, plan, _batch(dice, plan) * micro_batches, length, kept, dtype, micro_batches)


def _batch(dice: random.Random, plan: str) -> int:
    return Strategy.parse(plan).dp * dice.randrange(1, 4)


def _plan(dice: random.Random) -> str:
    """Two to eight ranks over random axes."""
    sizes = dict.fromkeys(AXES, 1)
    for _ in range(dice.choice((1, 1, 2, 2, 3))):
        axis, factor = dice.choice(AXES), dice.choice((2, 2, 2, 3, 4))
        if factor * _product(sizes) <= MOST_RANKS:
            sizes[axis] *= factor
    if _product(sizes) == 1:
        sizes["dp"] = 2
    strategy = Strategy(
        **sizes,
        zero=dice.choice((0, 0, 1, 2, 3)) if sizes["dp"] > 1 else 0,
        recompute=dice.choice(("none", "none", "full", "selective")),
        sequence_parallel=dice.random() < 0.7,
        vocab_parallel=dice.random() < 0.7,
    )
    return str(strategy)


def _product(sizes: Mapping[str, int]) -> int:
    product = 1
    for size in sizes.values():
        product *= size
    return product


def smaller(case: ParityCase) -> Iterator[ParityCase]:
    """Cases that are simpler in one respect."""
    strategy = Strategy.parse(case.plan)
    for change in ({"recompute": "none"}, {"zero": 0}, *({axis: 1} for axis in AXES)):
        simpler = replace(strategy, **change)  # type: ignore[arg-type]  # names and types are Strategy's
        if simpler != strategy and not (simpler.zero and simpler.dp == 1):
            yield replace(case, plan=str(simpler))
    if case.micro_batches > 1:
        yield replace(case, micro_batches=1)
    if case.batch > strategy.dp * case.micro_batches:
        yield replace(case, batch=strategy.dp * case.micro_batches)
    if case.length > 4:
        yield replace(case, length=case.length // 2)
    for name, value in case.sizes.items():
        for other in MODELS[case.model][1][name]:
            if other < value:
                yield replace(case, sizes={**case.sizes, name: other})

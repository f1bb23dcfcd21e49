"""Every impossible plan is refused when compiling: the rule, the block or stage, the nearest possible choice."""

from __future__ import annotations

import re
from functools import cache

import pytest
import torch

import hgc
from hgc.compiler import distribute, distribute_stages
from hgc.errors import HgcError
from hgc.ir.program import Program
from hgc.plan import Plan, Precision, Stage
from hgc.strategy import Strategy
from tests.families import FAMILIES

AXES: list[tuple[str, str, int, tuple[str, ...]]] = [
    ("gpt2", "dp3", 1, ("the batch (b) is 4", "dp=3 does not divide", "a global batch of 3")),
    ("gpt2", "dp4", 2, ("the batch (b) is 4", "dp=4 times 2 micro-batches", "a global batch of 8 or 1 micro-batch")),
    ("gpt2", "dp1", 3, ("the batch (b) is 4", "3 micro-batches does not divide", "or 2 micro-batches")),
    ("gpt2", "dp3", 2, ("dp=3 times 2 micro-batches", "a global batch of 6 or another dp")),
    ("gpt2", "tp3", 1, ("the sequence (s) is 16", "tp=3 does not divide", "sequence_parallel=False")),
    ("gpt2", "tp3 no-sequence-parallel", 1, ("attention of transformer.h.0", "4 heads", "tp=3", "possible tp sizes: 1, 2, 4")),
    ("bert", "tp8", 1, ("attention of bert.encoder.layer.0 has 4 heads", "tp=8", "possible tp sizes: 1, 2, 4")),
    ("llama", "tp8", 1, ("attention of model.layers.0 has 8 heads and 4 key-value heads", "tp=8", "possible tp sizes: 1, 2, 4")),
    ("vit", "tp3", 1, ("attention of vit.layers.0 has 4 heads", "tp=3", "possible tp sizes: 1, 2, 4")),
    ("gpt2", "sp8", 1, ("attention of transformer.h.0 has 4 heads", "sp=8", "possible sp sizes: 1, 2, 4")),
    ("gpt2", "sp2 tp4", 1, ("attention of transformer.h.0 has 4 heads, 1 on each", "sp=2", "possible sp sizes: 1")),
    ("gpt2", "sp3", 1, ("the sequence (s) is 16", "sp=3", "multiple of 3", "pad it to 18")),
    ("gpt2", "cp3", 1, ("the sequence (s) is 16", "cp=3", "multiple of 6", "pad it to 18")),
    ("t5", "cp8", 1, ("labels (t) is 8", "cp=8", "pad it to 16")),
    ("cnn", "cp2", 1, ("cp is 2", "no input of the model has a sequence", "use cp=1")),
    ("vit", "sp2", 1, ("sp is 2", "no input of the model has a sequence", "use sp=1")),
    ("gpt2", "tp2 zero3", 1, ("zero is 3 but dp is 1", "set dp to 2 or more, or zero to 0")),
]

Stages = tuple[tuple[int, int, str], ...]
PIPELINES: list[tuple[str, Stages, str, int, tuple[str, ...]]] = [
    ("gpt2", ((1, 0, "dp1"), (1, 1, "dp1")), "1f1b", 2, ("1 + 1 = 2 blocks", "GPT2LMHeadModel has 5", "give the last stage 4")),
    ("gpt2", tuple((1, rank, "dp1") for rank in range(6)), "1f1b", 2, ("= 6 blocks", "has 5", "use at most 5 stages")),
    ("gpt2", ((2, 0, "dp1"), (3, 2, "dp1")), "1f1b", 2, ("rank 1 has no stage", "lower first_rank")),
    ("gpt2", ((2, 0, "dp3"), (3, 3, "dp1")), "1f1b", 2, ("of GPT2LMHeadModelStage0 is 4", "dp=3", "a global batch of 6")),
    ("gpt2", ((2, 0, "dp1"), (3, 1, "dp1")), "1f1b", 3, ("GPT2LMHeadModelStage0", "3 micro-batches", "2 micro-batches")),
    ("gpt2", ((2, 0, "dp1"), (3, 1, "sp3")), "1f1b", 2, ("(s) of GPT2LMHeadModelStage1 is 16", "sp=3", "pad it to 18")),
    ("gpt2", ((2, 0, "dp1"), (3, 1, "tp3")), "gpipe", 2, ("of GPT2LMHeadModelStage1 is 16", "tp=3", "sequence_parallel=False")),
    ("bert", ((1, 0, "tp2 no-vocab-parallel"), (4, 2, "dp1")), "gpipe", 2, ("no layer of BertForMaskedLMStage0", "tp is 2", "use tp=1")),
    ("gpt2", ((2, 0, "dp1"), (3, 1, "dp1 zero1")), "1f1b", 2, ("zero of stage 1 is 1", "set dp to 2 or more, or zero to 0")),
    ("gpt2", ((2, 0, "dp1"), (3, 1, "dp1")), "zbv", 2, ("zbv needs", "in reverse order", "take zb-h1")),
    ("gpt2", tuple((n, r, "dp1") for n, r in ((1, 0), (1, 1), (1, 0), (2, 1))), "zbv", 2, ("zbv needs", "reverse order", "take zb-h1")),
    ("t5", tuple((n, r, "dp1") for n, r in ((3, 0), (3, 1), (2, 1), (2, 0))), "zbv", 2, ("zbv needs a chain", "take zb-h1")),
]

PRECISIONS: list[tuple[Precision, tuple[str, ...]]] = [
    (Precision(compute="float16"), ("compute float16", "use bfloat16")),
    (Precision(parameters="float16"), ("parameters float16", "use bfloat16")),
    (Precision(gradients="float16"), ("gradients float16", "use bfloat16")),
    (Precision(products="float8"), ("products in float8", "leave products out")),
    (Precision(compute="float32", parameters="float64"), ("compute float32 with parameters float64", "give both the same dtype")),
    (Precision(parameters="float32", master="bfloat16"), ("master bfloat16 is narrower", "leave master out")),
]


@cache
def traced(family: str) -> Program:
    torch.manual_seed(0)
    return hgc.trace(*FAMILIES[family]())


def compiled(family: str, plan: Plan) -> None:
    plan.validate(plan.devices)
    (distribute_stages if plan.stages else distribute)(traced(family), plan)


def refused(family: str, plan: Plan, pieces: tuple[str, ...]) -> None:
    with pytest.raises(HgcError) as caught:
        compiled(family, plan)
    sentence = str(caught.value)
    assert "\n" not in sentence
    assert [piece for piece in pieces if piece not in sentence] == [], sentence
    assert re.search(r"; |possible", sentence), f"no remedy: {sentence}"


@pytest.mark.parametrize(("family", "strategy", "micro_batches", "pieces"), AXES)
def test_axes(family: str, strategy: str, micro_batches: int, pieces: tuple[str, ...]) -> None:
    refused(family, Plan(Strategy.parse(strategy), micro_batches=micro_batches), pieces)


@pytest.mark.parametrize(("family", "stages", "schedule", "micro_batches", "pieces"), PIPELINES)
def test_pipelines(family: str, stages: Stages, schedule: str, micro_batches: int, pieces: tuple[str, ...]) -> None:
    made = tuple(Stage(blocks, first, Strategy.parse(text)) for blocks, first, text in stages)
    refused(family, Plan(stages=made, schedule=schedule, micro_batches=micro_batches), pieces)


@pytest.mark.parametrize(("precision", "pieces"), PRECISIONS)
def test_precisions(precision: Precision, pieces: tuple[str, ...]) -> None:
    refused("gpt2", Plan(Strategy(dp=2), precision=precision), pieces)


def test_the_nearest_choices_are_possible() -> None:
    """What the sentences above propose compiles."""
    compiled("gpt2", Plan(Strategy.parse("dp4")))
    compiled("gpt2", Plan(Strategy.parse("dp1"), micro_batches=2))
    compiled("gpt2", Plan(Strategy.parse("tp4")))
    compiled("gpt2", Plan(stages=(Stage(1, 0), Stage(4, 1)), micro_batches=2))
    compiled("gpt2", Plan(stages=(Stage(2, 0), Stage(3, 1)), schedule="zb-h1", micro_batches=2))

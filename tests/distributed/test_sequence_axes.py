"""Ulysses and ring attention in lowered programs: ranks as threads against the unmodified model, in float64, and what is communicated."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor

from hgc.backends.parity.case import precision, to_dtype, without_dropout
from hgc.compiler import distribute
from hgc.errors import ShardingError, VerifyError
from hgc.ir import ops
from hgc.ir.program import Program
from hgc.ir.verifier import verify
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tools.bench.zoo import find
from hgc.tracing import trace
from tests.distributed.lowered import run_lowered
from tests.families import FAMILIES, Built, token_ids

PLANS = ("sp2", "sp4", "cp2", "cp4", "cp2 sp2", "dp2 sp2", "dp2 cp2", "sp2 tp2", "cp2 tp2", "cp2 tp2 no-sequence-parallel")


def padded(family: str) -> Built:
    """A batch with attention masks: rows of unequal length."""
    model, batch = FAMILIES[family]()
    lengths = torch.tensor([16, 12, 10, 15])
    return model, batch | {"attention_mask": (torch.arange(16) < lengths[:, None]).long()}


def placed(family: str) -> Built:
    """A batch with positions of its own."""
    model, batch = FAMILIES[family]()
    return model, batch | {"position_ids": (torch.arange(16) + torch.arange(4)[:, None]) % 16}


def odd_groups() -> Built:
    """Key-value heads that no axis divides: 6 heads read 3."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=3, intermediate_size=64, vocab_size=64
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": token_ids(seed=1) % 64, "labels": token_ids(seed=2) % 64}


def windowed() -> Built:
    """A sliding window that ends inside a rank's chunk."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=64,
        sliding_window=5,
    )
    return transformers.MistralForCausalLM(config), {"input_ids": token_ids(seed=1) % 64, "labels": token_ids(seed=2) % 64}


CASES: dict[str, tuple[Callable[[], Built], tuple[str, ...]]] = {
    "llama": (FAMILIES["llama"], PLANS),
    "gpt2": (FAMILIES["gpt2"], PLANS),
    "bert": (FAMILIES["bert"], PLANS),
    "t5": (FAMILIES["t5"], ("sp2", "cp2", "cp2 sp2", "sp2 tp2")),
    "llama, padded": (lambda: padded("llama"), ("sp2", "cp2", "cp2 sp2", "cp2 tp2")),
    "bert, padded": (lambda: padded("bert"), ("sp2", "cp2", "cp2 sp2", "cp2 tp2")),
    "gpt2, placed": (lambda: placed("gpt2"), ("sp2", "cp2", "cp2 sp2")),
    "llama, 3 key-value heads": (odd_groups, ("sp2", "cp2 sp2")),
    "mistral, window 5": (windowed, ("sp2", "cp2", "cp4", "cp2 sp2")),
}


@cache
def traced(name: str) -> Program:
    torch.manual_seed(0)
    return trace(*CASES[name][0]())


@cache
def lowered(name: str, plan: str) -> Program:
    return distribute(traced(name), Plan(Strategy.parse(plan)))


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_the_model(name: str) -> None:
    make, plans = CASES[name]
    programs = {plan: lowered(name, plan) for plan in plans}  # traced in the model's own precision
    torch.manual_seed(0)
    model, batch = make()
    model, batch = model.double(), to_dtype(batch, torch.float64)
    state = {key: t.detach().clone() for key, t in model.state_dict().items()}
    with without_dropout(), precision(torch.float64):
        loss = model(**batch).loss
        loss.backward()
        expected = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        largest = max(float(g.abs().max()) for g in expected.values())
        for plan, program in programs.items():
            found, gradients = run_lowered(program, batch, state)
            assert abs(float(found - loss.detach())) < 1e-10 * abs(float(loss.detach())), plan
            assert set(gradients) == set(expected), plan
            for key, gradient in gradients.items():
                scale = max(float(expected[key].abs().max()), 1e-3 * largest)
                assert float((gradient - expected[key]).abs().max()) < 1e-10 * scale, (plan, key)


def movers(program: Program) -> set[str]:
    """Collectives of a program that send more than a number."""
    found = set()
    for block in program.blocks():
        for node in program.body(block.body).graph.nodes:
            sends = getattr(node.target, "__module__", "") == "hgc.ir.ops.collectives" and node.target not in (ops.shard, ops.shard_r)
            if sends and node.meta["hgc"].value.shape != ():
                found.add(f"{block.body}: {node.target.__name__}")
    return found


@pytest.mark.parametrize("plan", ["sp2", "cp2", "cp2 sp2", "dp2 cp2"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "bert", "t5"])
def test_nothing_but_attention_communicates(family: str, plan: str) -> None:
    assert movers(lowered(family, plan)) == set()


@pytest.mark.parametrize("family", ["OPT", "Mixtral", "DeepSeek-V3"])
def test_experts_and_counted_positions_need_nothing_else(family: str) -> None:
    """Tokens sharded in zigzag order are routed where they are; positions counted from a mask are cut where they are made."""
    pytest.importorskip("transformers")
    entry = find(family)
    program = trace(entry.build("small"), entry.batch(4, 16))
    assert movers(distribute(program, Plan(Strategy(cp=2, sp=2)))) == set()


@pytest.mark.parametrize("plan", ["sp2", "cp2"])
def test_masks_are_made_on_every_rank(plan: str) -> None:
    assert movers(lowered("llama, padded", plan)) == set()
    assert movers(lowered("bert, padded", plan)) == set()


def inputs(program: Program) -> dict[str, str]:
    return {str(n.target): ", ".join(f"{a}: {p}" for a, p in n.meta["hgc"].value.placements) for n in program.inputs()}


def test_causal_models_get_their_tokens_in_zigzag_order() -> None:
    program = lowered("llama", "cp2 sp2")
    assert inputs(program) == {"input_ids": "cp: S(1,zigzag), sp: S(1)", "labels": "cp: I, sp: I"}
    assert any("whole input 'labels'" in sentence for sentence in program.report)
    assert inputs(lowered("bert", "cp2")) == {"input_ids": "cp: S(1)", "labels": "cp: S(1)"}
    assert list(map(str, lowered("gpt2", "cp2").assumptions)) == ["Eq(Mod(s, 4), 0)"]
    assert list(map(str, lowered("gpt2", "sp2 tp2").assumptions)) == ["Eq(Mod(s, 4), 0)"]


@pytest.mark.parametrize(
    ("plan", "fault"),
    [
        ("cp2", {"ring_axis": None}),
        ("cp2", {"zigzag": False}),
        ("cp2", {"ring_axis": None, "exchange_axis": "cp"}),
        ("sp2", {"exchange_axis": None}),
        ("sp2", {"ring_axis": "sp", "exchange_axis": None, "zigzag": True}),
    ],
)
def test_attention_that_forgets_its_axis_is_refused(plan: str, fault: dict[str, object]) -> None:
    program = lowered("llama", plan).copy()
    (attend,) = (n for n in program.body("LlamaDecoderLayer").graph.nodes if n.target is ops.attention)
    attend.kwargs = {**attend.kwargs, **fault}
    with pytest.raises(VerifyError, match="no rule for attention"):
        verify(program)


@pytest.mark.parametrize(
    ("plan", "length", "sentence"),
    [
        ("sp2", 15, r"the sequence \(s\) is 15, which sp=2 cannot split: it must be a multiple of 2; pad it to 16"),
        ("cp2", 18, r"the sequence \(s\) is 18, which cp=2 cannot split: it must be a multiple of 4; pad it to 20"),
        ("sp2 tp2", 18, r"9 on each rank of cp and sp, which tp=2 does not divide"),
        ("sp3", 18, r"has 8 heads, which sp=3 does not divide; possible sp sizes: 1, 2, 4, 8"),
        ("sp8 tp2", 16, r"has 8 heads, 4 on each of 2 tensor-parallel ranks, which sp=8 does not divide; possible sp sizes: 1, 2, 4"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(plan: str, length: int, sentence: str) -> None:
    model, _ = FAMILIES["llama"]()
    batch: dict[str, Tensor] = {"input_ids": token_ids(length=length), "labels": token_ids(length=length)}
    with pytest.raises(ShardingError, match=sentence):
        distribute(trace(model, batch), Plan(Strategy.parse(plan)))


def test_a_model_without_a_sequence_is_refused() -> None:
    model, batch = FAMILIES["vit"]()
    with pytest.raises(ShardingError, match="sp is 2, but no input of the model has a sequence dim"):
        distribute(trace(model, batch), Plan(Strategy(sp=2)))


def test_repeated_key_value_heads_are_told() -> None:
    program = lowered("llama", "sp8")
    assert "attention has 4 key-value heads: each is sent to 2 ranks of 'sp'" in program.report

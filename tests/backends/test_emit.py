"""Emitted programs: what they look like, that they compute what the Program computes, and that depth costs nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

import pytest
import torch

from hgc import runtime
from hgc.backends.parity.threads import run_ranks
from hgc.backends.torchrun import emit, load_model, staged, write
from hgc.compiler import distribute
from hgc.errors import ArtifactError
from hgc.ir.program import Program
from hgc.plan import Plan, Precision
from hgc.strategy import Strategy
from hgc.tracing import empty_weights, trace
from tests.backends.emitted import run_both, state_of, without_alignment
from tests.families import FAMILIES, llama

GOLDEN = Path(__file__).parent / "golden"
PLANS = {
    "llama_dp2_tp2": Plan(Strategy.parse("dp2 tp2")),
    "llama_cp2": Plan(Strategy.parse("cp2")),
    "gpt2_sp2_tp2": Plan(Strategy.parse("sp2 tp2")),
    "llama_dp2_recompute": Plan(Strategy.parse("dp2 recompute"), micro_batches=2),
    "gpt2_dp2_zero2": Plan(
        Strategy.parse("dp2 zero2 recompute-selective"), precision=Precision("bfloat16", "bfloat16", "float32", "float32")
    ),
}
"""Golden file -> plan of the model that its name starts with."""
RENEW = "HGC_RENEW_GOLDEN"
"""Set this variable to write the golden files anew; then read what changed."""


@cache
def traced(family: str) -> Program:
    torch.manual_seed(0)
    return trace(*FAMILIES[family]())


def lowered(program: Program, strategy: str) -> tuple[Program, Plan]:
    plan = Plan(Strategy.parse(strategy))
    return distribute(program, plan), plan


@pytest.mark.parametrize("name", PLANS)
def test_a_program_reads_like_this(name: str) -> None:
    source = emit(distribute(traced(name.partition("_")[0]), PLANS[name]), PLANS[name])
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get(RENEW):
        golden.write_text(source, encoding="utf-8")
    assert source == golden.read_text(encoding="utf-8"), f"the emitted program changed; if it is better now, run with {RENEW}=1 and commit"


def test_the_same_program_gives_the_same_text() -> None:
    assert emit(traced("llama"), Plan()) == emit(trace(*llama()), Plan())


def test_the_same_text_in_every_process() -> None:
    """Sets of strings have another order in each process."""
    script = "from tests.backends.test_emit import *; print(emit(*lowered(traced('llama'), 'dp2 tp2')), end='')"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == emit(*lowered(traced("llama"), "dp2 tp2"))


@pytest.mark.parametrize("family", FAMILIES)
def test_source_computes_the_same_bits(family: str) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    program = traced(family)
    expected, found = run_both(program, state_of(model, program), inputs)
    assert torch.isfinite(found)
    assert torch.equal(expected, found)


@pytest.mark.parametrize("strategy", ["dp2 tp2", "tp2 no-sequence-parallel", "dp2 zero3"])
@pytest.mark.parametrize("family", ["llama", "gpt2-odd-vocabulary", "cnn"])
def test_distributed_source_gives_the_loss_of_one_device(family: str, strategy: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, inputs = FAMILIES[family]()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    single = trace(model.eval() if family != "cnn" else model, inputs)
    state = state_of(model, single)
    expected = single.run(inputs, {k: v.clone() for k, v in state.items()})
    program, plan = lowered(single, strategy)
    with staged(tmp_path / "out") as folder:
        write(folder, program, plan)
    emitted, info = load_model(tmp_path / "out")

    def rank_loss(rank: int) -> float:
        trainer = runtime.Trainer(emitted, info, state=state, device="cpu")
        return float(trainer.loss(inputs))

    losses = run_ranks(plan.devices, rank_loss)
    assert losses == pytest.approx([float(expected.detach())] * plan.devices, rel=1e-5)


def test_eighty_layers_are_one_class() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8, vocab_size=32000
    )
    with empty_weights():
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(16, 64, dtype=torch.int64)
    program, plan = lowered(trace(model, {"input_ids": ids, "labels": ids}), "dp8 tp8 zero3")
    start = time.process_time()
    source = emit(program, plan)
    assert time.process_time() - start < 2
    assert source.count("\n") < 250
    assert re.findall(r"^class (\w+)", source, re.MULTILINE) == ["Embeddings", "LlamaDecoderLayer", "Head", "Model"]
    assert 'rt.blocks("model.layers.{}", [LlamaDecoderLayer] * 80)' in source


@pytest.mark.parametrize("family", ["llama", "gpt2", "cnn"])
def test_formatters_and_linters_have_nothing_to_say(family: str, tmp_path: Path) -> None:
    ruff = shutil.which("ruff", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if ruff is None:
        pytest.skip("ruff is not installed")
    path = tmp_path / "program.py"
    path.write_text(without_alignment(emit(*lowered(traced(family), "dp2 tp2"))))
    options = ["--line-length", "140", "--isolated"]
    for command in (["check", "--select", "E,F,W,B,UP,SIM", *options], ["format", "--diff", *options]):
        done = subprocess.run([ruff, *command, str(path)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


def test_lines_are_not_too_long() -> None:
    for family in FAMILIES:
        for line in emit(traced(family), Plan()).splitlines():
            assert len(line) <= 140, line


def test_what_was_assumed_is_said_on_top() -> None:
    program, plan = lowered(traced("llama"), "tp2")
    program.report.append('operator "x" runs replicated\n""" import os')
    assert "  - operator 'x' runs replicated?''' import os\n" in emit(program, plan)


def test_a_plan_for_other_ranks_is_refused() -> None:
    with pytest.raises(ArtifactError, match="lowered for 1 ranks, the plan is for 4; distribute"):
        emit(traced("cnn"), Plan(Strategy.parse("dp4")))

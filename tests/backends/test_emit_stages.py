"""Emitted pipelines: what they look like, and that depth and stages alike cost a line."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

import pytest
import torch

from hgc.backends.torchrun import emit_stages
from hgc.compiler import distribute_stages
from hgc.errors import ArtifactError
from hgc.ir.program import Program
from hgc.passes.sharding.plan_text import PlanText
from hgc.plan import Plan, Stage
from hgc.schedule import Schedule
from hgc.strategy import Strategy
from hgc.tracing import empty_weights, trace
from tests.backends.test_emit import GOLDEN, RENEW
from tests.families import FAMILIES

UNLIKE = Plan(stages=(Stage(5, 0, Strategy(tp=2)), Stage(5, 2, Strategy(dp=2))), micro_batches=2)
PLANS: dict[str, str | Plan] = {"llama_pp4": "pp4 micro4", "t5_tp2_to_dp2": UNLIKE}
"""Golden file -> plan of the model that its name starts with."""


@cache
def traced(family: str) -> Program:
    torch.manual_seed(0)
    return trace(*FAMILIES[family]())


def source(program: Program, plan: str | Plan) -> str:
    chosen = PlanText.parse(plan).plan(program) if isinstance(plan, str) else plan
    lowered = distribute_stages(program, chosen)
    return emit_stages(lowered.stages, chosen, lowered.schedule)


@pytest.mark.parametrize("name", PLANS)
def test_a_pipeline_reads_like_this(name: str) -> None:
    text = source(traced(name.partition("_")[0]), PLANS[name])
    golden = GOLDEN / f"{name}.txt"
    if os.environ.get(RENEW):
        golden.write_text(text, encoding="utf-8")
    assert text == golden.read_text(encoding="utf-8"), f"the emitted program changed; if it is better now, run with {RENEW}=1 and commit"


def test_the_schedule_can_be_read_back() -> None:
    """Its long lines are joined by the backslash in front of their ends."""
    program = traced("llama")
    plan = PlanText.parse("pp4 micro4").plan(program)
    lowered = distribute_stages(program, plan)
    text = emit_stages(lowered.stages, plan, lowered.schedule)
    space: dict[str, str] = {}
    exec(text[text.index("SCHEDULE = ") : text.index("PLAN = ")], space)
    assert Schedule.parse(space["SCHEDULE"]) == lowered.schedule


def test_depth_costs_nothing_and_a_stage_some_lines() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(hidden_size=64, num_hidden_layers=80, num_attention_heads=4, intermediate_size=128, vocab_size=256)
    with empty_weights():
        model = transformers.LlamaForCausalLM(config)
    ids = torch.zeros(8, 16, dtype=torch.int64)
    text = source(trace(model, {"input_ids": ids, "labels": ids}), "pp4 tp2 micro4")
    assert len(text.splitlines()) < 280
    assert text.count("(rt.Block):") == 4
    assert text.count("(rt.Model):") == 3
    assert max(map(len, text.splitlines())) <= 140


def test_another_number_of_stages_is_refused() -> None:
    program = traced("llama")
    plan = PlanText.parse("pp2").plan(program)
    lowered = distribute_stages(program, plan)
    with pytest.raises(ArtifactError, match="there are 1 lowered stages, the plan has 2"):
        emit_stages(lowered.stages[:1], plan, lowered.schedule)


def test_a_saved_pipeline_is_checked_when_it_is_loaded(tmp_path: Path) -> None:
    from hgc.backends.torchrun import load_model, staged, write

    program = traced("llama")
    plan = PlanText.parse("pp2").plan(program)
    with staged(tmp_path / "out") as staging:
        write(staging, program, plan, distribute_stages(program, plan))
    stages, info = load_model(tmp_path / "out")
    assert len(stages) == len(info.stages) == 2
    program_file = tmp_path / "out" / "program.py"
    program_file.write_text(program_file.read_text().replace("STAGES = ", "NOTHING = ").replace("rt.main(STAGES", "rt.main(NOTHING"))
    with pytest.raises(ArtifactError, match="defines no class Model"), pytest.warns(UserWarning, match="edited"):
        load_model(tmp_path / "out")

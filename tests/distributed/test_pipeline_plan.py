"""Pipelines in one line of text."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import hgc
from hgc.errors import PlanError
from hgc.passes.sharding.plan_text import PlanText
from hgc.plan import Plan, Stage
from hgc.strategy import Strategy
from hgc.tools.cli import main
from tests.distributed.pipelines import subject


def test_words() -> None:
    assert PlanText.parse("dp2 tp2 zero3") == PlanText(Strategy(dp=2, tp=2, zero=3))
    assert PlanText.parse("pp4 dp2 tp2 gpipe micro8") == PlanText(Strategy(dp=2, tp=2), 4, 1, "gpipe", 8)
    assert PlanText.parse("pp2 virtual2") == PlanText(Strategy(), 2, 2, "interleaved", 2)
    assert PlanText.parse("zbv pp2, dp2") == PlanText(Strategy(dp=2), 2, 2, "zbv", 2)
    assert PlanText.parse("dp2 micro4").plan(subject("gpt2").program) == Plan(Strategy(dp=2), micro_batches=4)
    assert PlanText.parse("pp4 dp2 tp2").devices == 16


def test_stages_share_the_blocks_evenly() -> None:
    strategy = Strategy(dp=2)
    expected = Plan(strategy, stages=(Stage(3, 0, strategy), Stage(2, 2, strategy)), schedule="1f1b", micro_batches=2)
    assert PlanText.parse("pp2 dp2").plan(subject("gpt2").program) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("pp2 pp4", "gives pp twice; keep one"),
        ("pp2 1f1b gpipe", "gives its schedule twice; keep one"),
        ("dp2 1f1b", "has no pipeline that 1f1b could order; add for example pp2"),
        ("virtual2", "has no pipeline that virtual could order"),
        ("pp0", "pp is 0 in plan 'pp0'; expected 1 or more"),
        ("pp2 1f2b", "unknown word '1f2b' in strategy '1f2b'"),
    ],
)
def test_words_that_do_not_fit(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        PlanText.parse(text)


def test_more_stages_than_blocks() -> None:
    with pytest.raises(PlanError, match="8 stages need 8 blocks or more, but GPT2LMHeadModel has 5; use pp5 at most"):
        PlanText.parse("pp8").plan(subject("gpt2").program)


def test_compile_takes_the_text() -> None:
    from tests.families import gpt2

    executable = hgc.compile(*gpt2(), plan="pp2 micro4")
    assert executable.plan.devices == 2
    assert "rt.PipelineInfo(" in executable.code


def test_the_command_line_counts_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = "tests.small_models:works"
    assert main(["compile", model, "--devices", "4", "--plan", "pp2 tp4", "-o", str(tmp_path / "out")]) != 0
    assert "needs 8 devices, 2 places of 4, the cluster has 4; change pp or the strategy" in " ".join(capsys.readouterr().err.split())

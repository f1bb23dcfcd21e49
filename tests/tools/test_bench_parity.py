"""``hgc bench parity``: random cases agree; what does not agree is found, made small, and printed so that it can be repeated."""

from __future__ import annotations

import sys

import pytest

from hgc.backends.parity import verify
from hgc.backends.parity.case import Case, Outcome
from hgc.backends.parity.worker import run_rank
from hgc.errors import HgcError
from hgc.strategy import Strategy
from hgc.tools.bench import parity
from hgc.tools.bench.parity_cases import ParityCase, draw
from hgc.tools.cli import main

SEED, CHUNK = 11, 10
SMALL = ParityCase("gpt2", "dp2", 2, 4, {"heads": 2, "head_dim": 4, "layers": 1, "ffn": 17, "vocabulary": 31})


@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_random_cases_agree_or_are_refused(first: int) -> None:
    found = [(case, parity.check(case)) for case in (draw(SEED, index) for index in range(first, first + CHUNK))]
    assert not [(str(case), outcome) for case, outcome in found if outcome.bad]
    assert sum(outcome.kind == "equal" for _, outcome in found) >= CHUNK // 3


def test_a_case_is_repeated_by_its_text() -> None:
    for index in range(50):
        case = draw(SEED, index)
        assert ParityCase.parse(str(case)) == case


def test_a_difference_is_found_and_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = sys.modules[verify.__module__]
    right = run_rank

    def wrong(model: object, plan: object, case: Case) -> Outcome:
        outcome = right(model, plan, case)
        return Outcome([loss * 1.001 for loss in outcome.losses], outcome.gradients, outcome.state)

    monkeypatch.setattr(module, "run_rank", wrong)
    result = parity.run(case=str(SMALL))
    assert not result["targets"][0]["holds"]
    assert "hgc bench parity --case '" in capsys.readouterr().out


def test_failures_shrink_to_what_matters() -> None:
    """A made-up failure of tensor parallelism over more than one layer ends at two layers, two ranks, nothing else."""

    def judge(case: ParityCase) -> parity.Outcome:
        return parity.Outcome("different" if Strategy.parse(case.plan).tp > 1 and case.sizes["layers"] > 1 else "equal")

    large = ParityCase(
        "llama", "dp2 tp4 zero3 recompute", 12, 16, {**SMALL.sizes, "layers": 3, "heads": 8, "shared": 2, "tied": 1}, micro_batches=2
    )
    small, outcome = parity.shrink(large, judge)
    assert outcome.bad
    assert (small.plan, small.sizes["layers"], small.sizes["heads"], small.batch, small.micro_batches) == ("tp4", 2, 1, 1, 1)


def test_an_error_that_is_no_refusal_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "_compare", lambda case: 1 / 0)
    assert parity.check(SMALL).kind == "failed"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [("{", "the case"), ('{"model": "gpt3", "plan": "dp2", "batch": 2, "length": 4}', "did you mean 'gpt2'?"), ('{"modle": 1}', "is none")],
)
def test_mistakes_in_a_case(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HgcError, match="the case"):
        ParityCase.parse(text)
    assert main(["bench", "parity", "--case", text]) == 2
    assert sentence in capsys.readouterr().err

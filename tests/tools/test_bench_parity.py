"""``hgc bench parity``: random cases agree; what does not agree is found, made small, and printed so that it can be repeated."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace

import pytest

from hgc.backends.parity import verify
from hgc.backends.parity.case import Case, Outcome
from hgc.backends.parity.worker import run_rank
from hgc.errors import HgcError
from hgc.plan import SCHEDULES
from hgc.runtime.pipeline_tied import TiedGradients
from hgc.strategy import Strategy
from hgc.tools.bench import parity, parity_check
from hgc.tools.bench.parity_cases import PRECISIONS, ParityCase, shared_out
from hgc.tools.bench.parity_draw import GROUP, draw
from hgc.tools.bench.parity_models import EXPERTS, MODELS
from hgc.tools.bench.parity_shrink import shrink
from hgc.tools.cli import main

SEED, CHUNK = 11, 2 * GROUP
SMALL = ParityCase("gpt2", "dp2", 2, 4, {"heads": 2, "head_dim": 4, "layers": 1, "ffn": 17, "vocabulary": 31, "tied": 1})

FAILED_ONCE = (
    # a stage's result that a recomputed block of the same stage reads, under split backward
    (
        '{"model":"llama","plan":"dp1","batch":1,"length":12,"sizes":{"heads":8,"head_dim":12,"layers":2,"ffn":24,"vocabulary":97,"tied":0,'
        '"shared":2},"stages":[[1,0,"dp1"],[1,0,"dp1 recompute"],[1,0,"dp1"]],"schedule":"zb-h1","frozen":5}'
    ),
    # recomputation under a function mode; a list of blocks on lines of its own in a stage's source
    (
        '{"model":"zoo:Switch","plan":"dp1","batch":2,"length":4,"dtype":"float64","stages":[[1,0,"dp1 recompute"],[1,0,"dp1 recompute"],'
        '[4,0,"dp1 recompute"]],"schedule":"gpipe"}'
    ),
    # experts that get no token in some step
    '{"model":"zoo:Switch","plan":"dp2","batch":2,"length":11,"dtype":"float64"}',
)
"""Cases that random runs have found."""


@pytest.mark.parametrize("first", range(0, 100, CHUNK))
def test_random_cases_agree_or_are_refused(first: int) -> None:
    found = parity.check_group((SEED, first, first + CHUNK))
    assert not [(str(case), outcome) for case, outcome in found if outcome.bad]
    assert sum(outcome.kind == "equal" for _, outcome in found) >= CHUNK // 3


@pytest.mark.parametrize("text", FAILED_ONCE)
def test_what_failed_once(text: str) -> None:
    assert parity_check.check(ParityCase.parse(text)).kind == "equal"


def test_a_case_is_repeated_by_its_text() -> None:
    for index in range(100):
        case = draw(SEED, index)
        assert ParityCase.parse(str(case)) == case
        assert case == draw(SEED, index)


def test_the_whole_space_is_drawn() -> None:
    cases = [draw(SEED, index) for index in range(600)]
    staged = [case for case in cases if case.stages]
    strategies = [strategy for case in cases for strategy in case.strategies]
    assert {case.schedule for case in staged} == set(SCHEDULES)
    assert {case.precision for case in cases} == set(PRECISIONS)
    assert {case.model for case in cases} > {*MODELS, *(f"zoo:{name}" for name in EXPERTS)}
    for axis in ("dp", "cp", "sp", "tp"):
        assert any(getattr(strategy, axis) > 1 for strategy in strategies)
    assert {strategy.zero for strategy in strategies} == {0, 1, 2, 3}
    assert {strategy.recompute for strategy in strategies} == {"none", "full", "selective"}
    layouts = {tuple(strategy.devices for strategy in case.strategies) for case in staged}
    assert {(3, 1), (4, 2, 2), (2, 4), (1, 2, 1)} <= layouts
    ranks = [[range(first, first + Strategy.parse(text).devices) for _, first, text in case.stages] for case in staged]
    assert any(set(a) & set(b) and a != b for stages in ranks for a in stages for b in stages), "stages share ranks"
    assert any(len({share for share, *_ in case.stages}) > 1 for case in staged), "cuts are uneven"
    for what in ("frozen", "dropout", "own_trace"):
        assert 0.02 < sum(bool(getattr(case, what)) for case in cases) / len(cases) < 0.6, what


@pytest.mark.parametrize(("blocks", "shares", "counts"), [(5, [1, 1], [2, 3]), (5, [4, 1, 1], [3, 1, 1]), (3, [1, 4, 1], [1, 1, 1])])
def test_shares_become_blocks(blocks: int, shares: list[int], counts: list[int]) -> None:
    assert shared_out(blocks, shares) == counts


def test_more_stages_than_blocks_are_refused() -> None:
    outcome = parity_check.check(replace(SMALL, stages=tuple((1, 0, "dp1") for _ in range(9))))
    assert outcome.kind == "refused"
    assert "use at most 3 stages" in outcome.what


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


def test_a_planted_fault_shrinks_and_the_printed_command_repeats_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stages that do not add up the gradients of a tied table."""
    large = replace(SMALL, batch=8, sizes={**SMALL.sizes, "heads": 1, "ffn": 24}, micro_batches=2, schedule="zb-h1", frozen=0)
    large = replace(large, stages=((2, 0, "dp2 zero1"), (1, 2, "dp1 recompute")))
    with monkeypatch.context() as planted:
        planted.setattr(TiedGradients, "add_up", lambda self: None)
        assert main(["bench", "parity", "--case", str(large)]) == 1
        printed = "".join(capsys.readouterr().out.split("\n  hgc ")[-1].splitlines())
        program, *command = shlex.split(f"hgc {printed}")
        small = ParityCase.parse(command[-1])
        assert (program, small.model, small.micro_batches, small.schedule) == ("hgc", "gpt2", 1, "gpipe")
        assert (small.sizes["tied"], small.sizes["layers"], small.sizes["ffn"], small.batch) == (1, 1, 17, 1)
        assert [text for *_, text in small.stages] == ["dp1", "dp1"]
        assert main(command) == 1
    assert main(command) == 0


def test_failures_shrink_to_what_matters() -> None:
    """A made-up failure of tensor parallelism over more than one layer ends at two layers, two ranks, nothing else."""

    def judge(case: ParityCase) -> parity.Outcome:
        failing = any(strategy.tp > 1 for strategy in case.strategies) and case.sizes["layers"] > 1
        return parity.Outcome("different" if failing else "equal")

    sizes = {**SMALL.sizes, "layers": 3, "heads": 8, "shared": 2}
    stages = ((2, 0, "dp2 tp4 zero3 recompute"), (1, 8, "dp3"), (1, 0, "dp2"))
    large = ParityCase("llama", "dp1", 12, 16, sizes, "float64", 2, stages, "zb-h1", 3, "", False, True)
    small, outcome = shrink(large, judge)
    assert outcome.bad
    assert (small.plan, small.sizes["layers"], small.sizes["heads"], small.batch, small.micro_batches) == ("tp4", 2, 1, 1, 1)
    assert (small.stages, small.frozen, small.own_trace) == ((), 0, False)


def test_shrinking_keeps_the_kind_of_failure() -> None:
    """Whatever else may go wrong with smaller cases is another story."""

    def judge(case: ParityCase) -> parity.Outcome:
        return parity.Outcome("failed", "RuntimeError: large") if case.batch > 4 else parity.Outcome("failed", "ValueError: small")

    small, outcome = shrink(replace(SMALL, batch=8), judge)
    assert (small.batch, outcome.what) == (8, "RuntimeError: large")


def test_jobs_find_what_one_process_finds() -> None:
    rows = [parity.run(cases=2, seed=5, jobs=jobs)["rows"] for jobs in (1, 2)]
    assert rows[0] == rows[1]


def test_an_error_that_is_no_refusal_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity_check, "compare_case", lambda case: 1 / 0)
    assert parity_check.check(SMALL).kind == "failed"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "the case"),
        ('{"model": "gpt3", "plan": "dp2", "batch": 2, "length": 4}', "did you mean 'gpt2'?"),
        ('{"model": "gpt2", "plan": "dp2", "batch": 2, "length": 4, "precision": "autocat"}', "did you mean 'autocast'?"),
        ('{"modle": 1}', "is none"),
        ("[]", "is none"),
        ('{"stages": [[1, 2]]}', "is none"),
    ],
)
def test_mistakes_in_a_case(text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HgcError, match="the case"):
        ParityCase.parse(text)
    assert main(["bench", "parity", "--case", text]) == 2
    assert sentence in capsys.readouterr().err

"""Plans: JSON round trip, validation, and errors that name the thing and the remedy."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgc import plan as module
from hgc import records
from hgc.errors import PlanError
from hgc.plan import SCHEDULES, Plan, Precision, Prediction, Stage
from hgc.strategy import RECOMPUTE, Strategy, nearest_strategy

scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
sizes = st.integers(1, 4096)
strategies = st.builds(
    Strategy,
    dp=sizes,
    tp=sizes,
    cp=sizes,
    sp=sizes,
    zero=st.sampled_from([0, 1, 2, 3]),
    sequence_parallel=st.booleans(),
    vocab_parallel=st.booleans(),
    recompute=st.sampled_from(RECOMPUTE),
)
predictions = st.builds(
    Prediction,
    step_s=st.none() | st.floats(0, 1e6),
    memory_bytes=st.none() | st.integers(0, 2**50),
    communication_bytes=st.none() | st.integers(0, 2**50),
    basis=st.text(),
)
dtypes = st.sampled_from(["", "float32", "bfloat16"])
precisions = st.builds(
    Precision, compute=dtypes, parameters=dtypes, master=dtypes, gradients=dtypes, products=st.sampled_from(["", "float8", "float4"])
)
stages = st.builds(Stage, blocks=sizes, first_rank=st.integers(0, 1023), strategy=st.none() | strategies)
plans = st.builds(
    Plan,
    strategies,
    stages=st.lists(stages, max_size=4).map(tuple),
    schedule=st.sampled_from(SCHEDULES),
    micro_batches=sizes,
    precision=precisions,
    program_hash=st.text(),
    predicted=predictions,
    notes=st.lists(st.text()).map(tuple),
)


@given(plans)
def test_json_round_trip(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


@given(plans)
def test_repr_is_the_constructor_call(plan: Plan) -> None:
    assert eval(repr(plan), vars(module)) == plan


@given(strategies)
def test_strategy_text_round_trip(strategy: Strategy) -> None:
    assert Strategy.parse(str(strategy)) == strategy


@pytest.mark.parametrize("text", ["dp2 tp4 zero3", "dp2xtp4xzero3", "dp2 x tp4 x zero3", "dp2,tp4,zero3", "tp=4 dp=2 zero=3"])
def test_strategy_spellings(text: str) -> None:
    assert Strategy.parse(text) == Strategy(dp=2, tp=4, zero=3)


@given(strategies, st.integers(1, 5000))
def test_nearest_strategy_fits(strategy: Strategy, devices: int) -> None:
    nearest = nearest_strategy(strategy, devices)
    Plan(nearest).validate(devices)
    if devices == strategy.devices and strategy.dp > 1:
        assert nearest == strategy


@given(plans, st.data())
def test_no_damaged_plan_is_read(plan: Plan, draw: st.DataObject) -> None:
    """Whatever bytes are cut or changed, the result is a plan or a PlanError, never another exception."""
    text = plan.to_json()
    start = draw.draw(st.integers(0, len(text)))
    damaged = text[:start] + draw.draw(st.text(max_size=5)) + text[start + draw.draw(st.integers(0, 20)) :]
    with contextlib.suppress(PlanError):
        Plan.from_json(damaged)


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda v: st.lists(v) | st.dictionaries(st.text(), v))
)
def test_no_strange_json_is_read(content: object) -> None:
    for document in (content, {"version": 1, "decisions": content}, {"version": 1, "decisions": {"strategy": content}, "notes": content}):
        if document == {"version": 1, "decisions": {"strategy": {}}, "notes": []}:
            continue
        with pytest.raises(PlanError):
            Plan.from_json(json.dumps(document))


def test_mesh_is_major_first_without_axes_of_size_one() -> None:
    assert list(Strategy(tp=4, dp=2).mesh.items()) == [("dp", 2), ("tp", 4)]
    assert Strategy(tp=4).mesh == {"tp": 4}
    assert Strategy().mesh == {}
    assert Plan(Strategy(dp=2, tp=4)).devices == 8


def test_plan_is_frozen_and_hashable() -> None:
    plan = Plan(Strategy(dp=2), notes=("a",))
    assert len({plan, Plan(Strategy(dp=2), notes=("a",))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.strategy = Strategy()  # type: ignore[misc]


def test_str_shows_decisions_and_prediction_apart() -> None:
    plan = Plan(
        Strategy(dp=2, tp=2, zero=3), predicted=Prediction(0.0123, 2**31, 5_000_000, "nominal costs"), notes=("padded the vocabulary",)
    )
    assert str(plan).splitlines() == [
        "mesh             dp 2 x tp 2 = 4 devices",
        "data parallel    2 ranks share the batch; zero 3: parameters, gradients and optimizer state sharded",
        "tensor parallel  2 ranks share each layer; sequence split too, vocabulary split too",
        "made for         any program",
        "predicted        12.3 ms a step, 2 GiB at most on a device, 4.768 MiB sent by each device (nominal costs)",
        "note             padded the vocabulary",
    ]


def test_save_and_load(tmp_path: Path) -> None:
    plan = Plan(Strategy(dp=2, tp=2), program_hash="abc", notes=("é",))
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def test_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    Plan(Strategy(dp=2)).save(path)
    before = path.read_text()

    def interrupted(handle: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Plan(Strategy(dp=4)).save(path)
    assert path.read_text() == before
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


def _document(**changes: object) -> str:
    return json.dumps({"version": 1, "decisions": {"strategy": {"dp": 2}}} | changes)


def _strategy(**values: object) -> str:
    return _document(decisions={"strategy": values})


MISTAKES = [
    ("", "not valid JSON at line 1, column 1"),
    ('{"version": 1,', "not valid JSON at line 1"),
    ("[]", "not a JSON object; expected the keys version and decisions"),
    ("{}", "has no version; expected version 1"),
    (_document(version=2), "version 2, this hgc reads version 1; make the plan anew"),
    (_document(version=True), "version True, this hgc reads version 1"),
    (_document(strategy={}), "unknown key 'strategy' in the plan; expected one of version, program_hash, decisions"),
    (_document(desicions={}), "unknown key 'desicions' in the plan; did you mean 'decisions'?"),
    (_document(decisions={}), "the plan decides nothing"),
    (_document(decisions={"strategy": {}, "waves": []}), "unknown key 'waves' in decisions"),
    (_document(decisions={"strategy": [2]}), "strategy is [2]; expected an object with the keys dp, tp"),
    (_strategy(dpp=2), "unknown key 'dpp' in strategy; did you mean 'dp'?"),
    (_strategy(pipeline=2), "unknown key 'pipeline' in strategy; expected one of dp, tp"),
    (_strategy(dp="2"), "strategy.dp is '2'; expected a whole number"),
    (_strategy(dp=2.0), "strategy.dp is 2.0; expected a whole number"),
    (_strategy(dp=True), "strategy.dp is True; expected a whole number"),
    (_strategy(dp=0), "strategy: dp is 0; expected a whole number of 1 or more"),
    (_strategy(tp=-4), "strategy: tp is -4; expected a whole number of 1 or more"),
    (_strategy(zero=17), "strategy: zero is 17; expected 0, 1, 2 or 3, and the nearest is 3"),
    (_strategy(recompute="ful"), "strategy: recompute is 'ful'; did you mean 'full'?"),
    (_strategy(sequence_parallel=1), "strategy.sequence_parallel is 1; expected true or false"),
    (_document(notes="x"), "notes is 'x'; expected a list"),
    (_document(notes=[1]), "notes[0] is 1; expected text"),
    (_document(program_hash=3), "program_hash is 3; expected text"),
    (_document(predicted={"step_s": -1}), "predicted: step_s is -1.0; expected a number of 0 or more"),
    (_document(predicted={"seconds": 1}), "unknown key 'seconds' in predicted"),
    ('{"version": 1, "version": 1}', "has the key 'version' twice"),
    ('{"version": 1, "decisions": {"strategy": {"dp": NaN}}}', "holds NaN, which is not a number"),
]


@pytest.mark.parametrize(("text", "sentence"), MISTAKES)
def test_mistakes_in_json(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(PlanError) as caught:
        Plan.load(tmp_path / "plan.json")
    assert sentence in str(caught.value)
    assert str(tmp_path / "plan.json") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "the strategy is empty"),
        ("dp", "'dp' in strategy 'dp' has no size; write for example 'dp2'"),
        ("tq2", "unknown word 'tq2' in strategy 'tq2'; did you mean 'tp'?"),
        ("dp2 dp2", "gives 'dp' twice"),
        ("dp0", "dp is 0; expected a whole number of 1 or more"),
        ("dp2 no-vocab-paralel", "did you mean 'no-vocab-parallel'?"),
    ],
)
def test_mistakes_in_text(text: str, sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        Strategy.parse(text)


@pytest.mark.parametrize(
    ("plan", "devices", "sentence"),
    [
        (Plan(Strategy(dp=3, tp=2)), 4, "needs 6 devices (dp 3 x tp 2), the cluster has 4; the nearest strategy that fits is 'dp2 tp2'"),
        (Plan(Strategy()), 4, "needs 1 device (dp 1), the cluster has 4"),
        (Plan(Strategy(dp=4)), 1, "the nearest strategy that fits is 'dp1'"),
        (Plan(Strategy(tp=4, zero=3)), 4, "zero is 3 but dp is 1"),
        (Plan(Strategy(dp=4), program_hash="a" * 64), 4, "made for program aaaaaaaaaaaa, this program is bbbbbbbbbbbb"),
    ],
)
def test_plans_that_do_not_fit(plan: Plan, devices: int, sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        plan.validate(devices, program_hash="b" * 64)


def test_plan_for_any_program_fits_any_program() -> None:
    Plan(Strategy(dp=4)).validate(4, program_hash="b" * 64)
    Plan(Strategy(dp=4), program_hash="a").validate(4)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Strategy(dp=2.0),  # type: ignore[arg-type]
        lambda: Plan("dp2"),  # type: ignore[arg-type]
        lambda: Plan(notes="one"),  # type: ignore[arg-type]
        lambda: Plan(program_hash=7),  # type: ignore[arg-type]
        lambda: Plan(predicted=0.5),  # type: ignore[arg-type]
        lambda: Prediction(step_s=float("nan")),
    ],
)
def test_no_malformed_plan_can_be_built(make: object) -> None:
    with pytest.raises(PlanError, match="expected"):
        make()  # type: ignore[operator]


@pytest.mark.parametrize("name", ["", "missing/plan.json"])
def test_paths_that_cannot_be_written(name: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be written"):
        Plan().save(tmp_path / name)


def test_paths_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    for name, sentence in (("nothing.json", "does not exist"), ("", "is a folder"), ("binary", "is not text")):
        with pytest.raises(PlanError, match=sentence):
            Plan.load(tmp_path / name)


def test_decode_reports_missing_keys() -> None:
    @dataclasses.dataclass(frozen=True)
    class Pair:
        left: int
        right: int

    with pytest.raises(PlanError, match="pair lacks 'left', 'right'; add them"):
        records.decode(Pair, {}, "pair", PlanError)


def test_stages_share_the_ranks_out() -> None:
    plan = Plan(Strategy(tp=2), stages=(Stage(3, 0), Stage(2, 2, Strategy(dp=2, tp=2, zero=3))), micro_batches=4)
    assert plan.devices == 6
    assert [list(plan.ranks(index)) for index in range(2)] == [[0, 1], [2, 3, 4, 5]]
    plan.validate(6)
    assert "stage 1          2 blocks on ranks 2 to 5: dp2 tp2 zero3" in str(plan)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Plan(stages=(Stage(1, 0), Stage(1, 2))).validate(), "rank 1 has no stage"),
        (lambda: Plan(stages=(Stage(1, 0), Stage(1, 1, Strategy(zero=1)))).validate(), "zero of stage 1 is 1 but dp is 1"),
        (lambda: Plan(stages=(Stage(1, 0), Stage(1, 1))).validate(4), "needs 2 devices (2 stages), the cluster has 4"),
        (lambda: Plan(schedule="1F1B"), "schedule is '1F1B'; did you mean '1f1b'?"),
        (lambda: Plan(micro_batches=0), "micro_batches is 0; expected a whole number of 1 or more"),
        (lambda: Plan(precision=Precision(compute="half")), "compute is 'half'; expected '' (as the model) or one of"),
        (lambda: Stage(0, 0), "blocks is 0"),
    ],
)
def test_mistakes_in_pipelines(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(PlanError, match=re.escape(sentence)):
        make()

"""The fidelity benchmark: rows are read strictly, rebuilt as their sources say, and what they share is exactly what it would be alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hgc.errors import HgcError
from hgc.plan import Plan, Precision
from hgc.strategy import Strategy
from hgc.tools.bench import fidelity
from hgc.tools.bench.fidelity_execution import DISPATCH_S
from hgc.tools.bench.fidelity_models import NotRebuilt, build, example
from hgc.tools.bench.fidelity_plans import layout_of, plan_of, stage_layers
from hgc.tools.bench.fidelity_predict import case_of
from hgc.tools.bench.fidelity_programs import Programs, widened
from hgc.tools.bench.fidelity_rows import Row, read
from hgc.tools.bench.fidelity_statistics import Outcome, classify, order, spread
from hgc.tracing import trace

SAMPLE = Path(__file__).parent / "samples" / "published_rows.csv"


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    return {row.id: row for row in read(SAMPLE)[0]}


# -- rows ---------------------------------------------------------------------------------------------------------------------------------


def test_empty_cells_are_not_stated(rows: dict[str, Row]) -> None:
    row = rows["tiny-4"]
    assert (row.tp, row.kv_heads, row.step_time_s, row.mem_gib, row.recompute) == (2, 2, 0.03, None, "")
    assert row.place == "published_rows.csv, line 5"
    assert rows["tiny-3"].ran_out_of_memory


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tiny-2,", "tiny-2,extra,", r"line 3: the row has 44 cells and the header 43"),
        (",fp16,pretrain,2,2,", ",fp16,pretrain,two,2,", r"line 3, column 'tp': 'two' is not a whole number of 0 or more"),
        (",0.05,", ",-1,", r"line 2, column 'step_time_s': '-1' is not a number of 0 or more"),
        (",gpus,", ",cards,", r"has no column 'gpus'"),
    ],
)
def test_mistakes_name_file_line_and_column(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = SAMPLE.read_text(encoding="utf-8")
    assert old in text
    (tmp_path / "rows.csv").write_text(text.replace(old, new, 1), encoding="utf-8")
    with pytest.raises(HgcError, match=message):
        read(tmp_path / "rows.csv")


def test_files_with_other_columns_are_skipped_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(HgcError, match="holds no published rows"):
        read(tmp_path)
    (tmp_path / "rows.csv").write_text(SAMPLE.read_text(encoding="utf-8"), encoding="utf-8")
    assert len(read(tmp_path)[0]) == 6


# -- models and plans ---------------------------------------------------------------------------------------------------------------------


def test_what_a_row_becomes(rows: dict[str, Row]) -> None:
    case = case_of(rows["tiny-4"], {}, [])
    shape = case.architecture
    assert (shape.gated, shape.rms, shape.rotary, shape.flash, shape.dropout, shape.kv_heads) == (True, True, True, True, 0.0, 2)
    assert case.generation.name == "Megatron-Core"
    plan = plan_of(case.row, case.layout, case.generation, shape.layers, "none")
    assert str(plan.strategy) == "dp2 cp2 tp2 zero1"
    assert [(stage.blocks, stage.first_rank) for stage in plan.stages] == [(2, 0), (1, 8), (1, 0), (2, 8)]
    assert (plan.schedule, plan.micro_batches, plan.devices) == ("interleaved", 4, 16)
    assert plan.precision == Precision("bfloat16", "bfloat16", "float32", "bfloat16", "float8")
    old = case_of(rows["tiny-1"], {}, [])
    assert (old.architecture.flash, old.architecture.dropout, old.architecture.tied) == (False, 0.1, True)


def test_what_is_known_of_single_runs_changes_how_they_ran_and_is_noted(rows: dict[str, Row]) -> None:
    """Large jobs of BLOOM's sweep waited for each kernel; those in bfloat16 summed whole gradients."""
    old = replace(rows["tiny-1"], dataset="bloom_prequel", framework="Megatron-DeepSpeed", precision="fp16", gpus=384, dp=None, gbs=None)
    assert old.gpu.startswith(("V100", "A100"))
    large, small, other = old, replace(old, gpus=8), replace(old, dataset="mtnlg_530b")
    found = {name: case_of(row, {}, []) for name, row in {"large": large, "small": small, "other": other}.items()}
    dispatch = {name: case.generation.execution.dispatch_s for name, case in found.items()}
    assert dispatch == {"large": DISPATCH_S, "small": 0.0, "other": 0.0}
    assert any("CUDA_LAUNCH_BLOCKING" in note for note in found["large"].notes)
    assert not any("CUDA_LAUNCH_BLOCKING" in note for note in found["small"].notes)
    narrow = case_of(replace(large, precision="bf16"), {}, [])
    assert narrow.generation.execution.sums_whole
    assert narrow.generation.execution.dispatch_s == DISPATCH_S
    assert not found["large"].generation.execution.sums_whole


@pytest.mark.parametrize(("name", "reason"), [("tiny-5", "mixture of experts"), ("tiny-6", "LoRA")])
def test_rows_that_cannot_be_rebuilt_say_why(rows: dict[str, Row], name: str, reason: str) -> None:
    with pytest.raises(NotRebuilt, match=reason):
        case_of(rows[name], {}, [])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tp": None}, "does not state tp"),
        ({"gpus": 9}, "does not divide 9 GPUs"),
        ({"tp": 0}, "tp is 0"),
        ({"gbs": 33}, "does not divide the global batch 33"),
        ({"dp": 2}, "dp 2 is stated, but 8 GPUs"),
    ],
)
def test_impossible_layouts(rows: dict[str, Row], changes: dict[str, int | None], reason: str) -> None:
    with pytest.raises(NotRebuilt, match=reason):
        layout_of(replace(rows["tiny-1"], **changes), 4)  # type: ignore[arg-type]


def test_heads_come_from_the_nearest_row_of_the_same_width(rows: dict[str, Row]) -> None:
    known = replace(rows["tiny-1"], id="known", heads=16)
    case = case_of(replace(rows["tiny-1"], heads=None), {}, [known])
    assert case.architecture.heads == 16
    assert "heads are not stated, 16 assumed as in known" in case.notes


def test_layers_of_stages() -> None:
    assert stage_layers(96, 8) == (12,) * 8
    assert stage_layers(126, 64) == (1, *(2,) * 62, 1)
    assert stage_layers(78, 12) == (7,) * 6 + (6,) * 6
    assert stage_layers(30, 32) == (0, *(1,) * 30, 0)


@pytest.mark.parametrize("name", ["tiny-1", "tiny-4"])
def test_the_module_computes_its_loss(rows: dict[str, Row], name: str) -> None:
    """The traced program is the module: same parameters, a loss, and one block for each layer."""
    shape = replace(case_of(rows[name], {}, []).architecture, layers=2)
    program = trace(build(shape, torch.float32), example(2, shape.positions))
    assert [block.body for block in program.blocks()] == ["Embeddings", "Layer", "Layer", "Head"]
    assert not program.report


# -- programs -----------------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_widened_program_is_that_of_more_ranks(rows: dict[str, Row]) -> None:
    """Sharing over data-parallel sizes changes no cost: expressions equal those of a program lowered for that size."""
    shape = replace(case_of(rows["tiny-1"], {}, []).architecture, layers=1)
    programs = Programs()
    (two,) = programs.stages(shape, Plan(Strategy(dp=2, tp=2), precision=Precision(compute="float16")), (1,))
    wide = widened(two, "dp", 4)
    import hgc.tools.bench.fidelity_programs as module

    few, module.FEW = module.FEW, 4
    try:
        (four,) = Programs().stages(shape, Plan(Strategy(dp=4, tp=2), precision=Precision(compute="float16")), (1,))
    finally:
        module.FEW = few
    assert wide.program.mesh == four.program.mesh
    assert wide.costs.expressions() == four.costs.expressions()
    assert wide.costs.communication == four.costs.communication


# -- statistics ---------------------------------------------------------------------------------------------------------------------------


def test_spread() -> None:
    found = spread([0.1, -0.3, None, 0.2])
    assert found is not None
    assert (found.rows, found.median, found.bias) == (3, pytest.approx(0.2), pytest.approx(0.1))
    assert spread([None]) is None


def test_classification_counts_both_kinds(rows: dict[str, Row]) -> None:
    fits, full = {"memory_bytes": 1.0, "capacity_bytes": 2.0}, {"memory_bytes": 3.0, "capacity_bytes": 2.0}
    found = classify([Outcome(rows["tiny-1"], **fits), Outcome(rows["tiny-3"], **full), Outcome(rows["tiny-2"], **full)])  # type: ignore[arg-type]
    assert (found.ran, found.ran_right, found.out, found.out_right) == (2, 1, 1, 1)
    assert found.accuracy == pytest.approx(2 / 3)


def test_order_of_plans(rows: dict[str, Row]) -> None:
    slow, quick = rows["tiny-1"], rows["tiny-2"]
    assert order([Outcome(slow, 2.0), Outcome(quick, 1.0)]).tau == 1
    assert order([Outcome(slow, 1.0), Outcome(quick, 2.0)]).tau == -1
    assert order([Outcome(slow, 1.0), Outcome(replace(quick, heads=4), 2.0)]).pairs == 0


# -- the command --------------------------------------------------------------------------------------------------------------------------


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    result = fidelity.run(str(SAMPLE), processes=1)
    found = {row["id"]: row for row in result["rows"]}
    assert list(found) == [f"tiny-{number}" for number in range(1, 7)]
    for name in ("tiny-1", "tiny-2", "tiny-4"):
        assert 1e-3 < found[name]["predicted_step_s"] < 0.5, found[name]["reason"]
        assert 2**28 < found[name]["predicted_memory_bytes"] < 2**33
    assert found["tiny-3"]["predicted_fits"] is False
    assert found["tiny-1"]["step_error"] == pytest.approx(found["tiny-1"]["predicted_step_s"] / 0.05 - 1)
    assert (found["tiny-5"]["reason"], found["tiny-5"]["predicted_step_s"]) == ("it is a mixture of experts", None)
    assert [set(target) for target in result["targets"]] == [{"name", "value", "limit", "holds"}] * 5
    assert result["bench"] == "fidelity"
    assert "LoRA" in capsys.readouterr().out


def test_data_must_be_given() -> None:
    with pytest.raises(HgcError, match="give --data"):
        fidelity.run()

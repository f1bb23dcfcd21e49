"""``hgc bench search``: profiles as problems, and targets that can be missed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hgc.errors import ArtifactError
from hgc.tools.bench import search as bench
from hgc.tools.bench import search_profiles
from hgc.tools.bench.search_problems import Model

HEADER = "core,model,gpus,budget_GB,bsz,sp_space,plan,thr,cpu_s"
ROWS = ("public,bert-base,8,8,16,tp,1-1-8 x12,55.5,120.0", "equivalent_vectorised,bert-base,8,8,16,tp,1-1-8 x12,55.5,1.0")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model on eight devices."""
    files = {
        "models/v2.4.0__bert_hf__memory_profiling_bf16_hidden768_head12.json": {
            "layertype_0_sp": {
                "512": {"parameter_size": 27.0, "tp_activation_per_bsz_dict": {"1": 40, "2": 20, "4": 10, "8": 5, "checkpoint": 1}}
            }
        },
        "models/v2.4.0__bert_hf__computation_profiling_bf16_hidden768_head12.json": {"layertype_0_bsz1_seq512": 2.0},
        "hardware/allreduce_bandwidth_1nodes_8gpus_per_node.json": {
            f"allreduce_size_{ranks}_consec_{near}": 100.0 for ranks in (2, 4, 8) for near in (0, 1)
        },
        "hardware/p2p_bandwidth_1nodes_8gpus_per_node.json": {"pp_size_2": 80.0, "pp_size_4": 80.0, "pp_size_8": 80.0},
        "hardware/overlap_coefficient.json": {"overlap_coe": 1.1},
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(content))
    (tmp_path / "results.csv").write_text("\n".join([HEADER, *ROWS]))
    return tmp_path


def test_profiles_become_problems(folder: Path) -> None:
    (row,) = search_profiles.recorded(folder)
    assert (row.model, row.throughput, row.cpu_s) == ("bert-base", 55.5, 120.0)
    found = search_profiles.problems(folder, row)
    assert {problem.stages for problem in found} == {1, 2, 4, 8}
    alone = next(problem for problem in found if problem.stages == 1 and problem.micro_batches == 1)
    assert alone.blocks == 12
    assert alone.limit == 7 * 2**30
    assert alone.micro_s[0].min() == pytest.approx(2 * 0.002 * 3)  # two samples a rank, data parallel


def test_public_rows_are_compared(folder: Path) -> None:
    rows: list[dict[str, object]] = []
    (target,) = bench._public(folder, rows)
    assert len(rows) == 1
    assert rows[0]["public_s"] == 120.0
    assert target["value"] == pytest.approx(120.0 / float(str(rows[0]["solver_s"])))


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    (row,) = search_profiles.recorded(folder)
    (folder / "hardware" / "overlap_coefficient.json").unlink()
    with pytest.raises(ArtifactError, match=r"overlap_coefficient.json cannot be read"):
        search_profiles.problems(folder, row)
    with pytest.raises(ArtifactError, match=r"has no results.csv"):
        list(search_profiles.recorded(tmp_path / "models"))


def test_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short run; a solver that returns any choice that fits misses the target of brute force."""
    small = Model("small", 4, 256, 128, 1e12, 8e9, 4)
    monkeypatch.setattr(bench, "MODELS", (small,) * 4)
    monkeypatch.setattr(bench, "SEARCHES", ((small, 4, 8, 1, 4, 60.0),))
    monkeypatch.setattr(bench, "STEPS", 200)
    found = bench.run(cases=20)
    assert all(target["holds"] for target in found["targets"])
    assert {row["kind"] for row in found["rows"]} >= {"stage", "search"}
    monkeypatch.setattr(bench, "solve", lambda chain, tolerance: None)
    assert not bench._brute_force(20)["holds"]

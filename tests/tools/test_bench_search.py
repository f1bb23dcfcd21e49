"""``hgc bench search``: profiles as problems, and targets that can be missed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hgc.errors import ArtifactError, PlanError
from hgc.passes.sharding.search.galvatron import engine_step_s
from hgc.passes.sharding.search.pipeline import StagePlan, step_s
from hgc.tools.bench import search as bench
from hgc.tools.bench import search_profiles, search_public
from hgc.tools.bench.search_problems import Model

HEADER = "core,model,gpus,budget_GB,bsz,sp_space,tag,chunks,stages,plan,thr,mem_MB,vtp,cpu_s"
ROWS = (
    "public,bert-base,8,8,16,tp,,1,[12],1-1-8f-c x4 | 1-1-8 x8,55.5,[4000],2,120.0",
    'equivalent_vectorised,bert-base,8,8,16,tp,max_tp 2,2,"[3, 9]",2-2-2 x3 | 2-2*-2 x9,44.5,"[3000, 4000]",1,1.0',
    "public,bert-base,8,8,16,tp+sp,,1,[12],1-1-8 x12,55.5,[4000],1,120.0",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One model on eight devices."""
    files = {
        "models/v2.4.0__bert_hf__memory_profiling_bf16_hidden768_head12.json": {
            "layertype_0_sp": {
                "1024": {"parameter_size": 27.0, "tp_activation_per_bsz_dict": {"1": 40, "2": 20, "4": 10, "8": 5, "checkpoint": 1}}
            },
            **{
                f"other_memory_pp_{where}_sp": {"1024": {"model_states": {"1": 64.0, "2": 32.0}, "activation": {"1": 10.0, "2": 6.0}}}
                for where in ("off", "on_first", "on_last")
            },
        },
        "models/v2.4.0__bert_hf__computation_profiling_bf16_hidden768_head12.json": {
            "layertype_0_bsz1_seq1024": 2.0,
            "layertype_other_bsz1_seq1024": 3.0,
        },
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
    row, other = search_profiles.recorded(folder)
    assert (row.model, row.throughput, row.cpu_s, row.own_core, row.vocabulary_tp) == ("bert-base", 55.5, 120.0, True, 2)
    assert (other.cuts, other.most_tp, other.own_core) == ((3, 9), 2, False)
    found = search_profiles.problems(folder, row)
    assert {problem.stages for problem in found} == {1, 2, 4, 8}
    alone = search_profiles.Problems(folder, row).problem(1, 1, 1)
    assert alone.blocks == 12 + 2
    assert alone.limit == 7 * 2**30
    assert alone.micro_s[1].min() == pytest.approx(2 * 0.002 * 3)  # two samples a rank, data parallel


def test_ends_of_the_model(folder: Path) -> None:
    """Two samples a rank: 3 ms each, forward and twice backward, half in each end; split over two ranks each has four samples of half the
    work, and an all-reduce of 4 * 1.5 MiB among neighbours in each end. States of 16 bytes a parameter, ZeRO 2 over 8 or 4 ranks."""
    row = next(search_profiles.recorded(folder))
    made = search_profiles.Problems(folder, row)
    whole, split = made.problem(1, 1, 1), made.problem(1, 1, 2)
    assert whole.micro_s[0, 0] == pytest.approx(3 * 2 * 0.003 / 2)
    assert split.micro_s[0, 0] == pytest.approx(3 * 2 * 0.003 / 2 + 4 * 768 * 1024 * 2 / 100e9)
    assert whole.micro_s[-1, 0] == whole.micro_s[0, 0]
    assert whole.saved[0, 0] == 2 * 10 * 2**20
    assert whole.state[0, 0] == pytest.approx(64 * 2**20 * (7 / 8 * (1 / 8 + 0.003) + 1 / 8))
    assert split.saved[0, 0] == 4 * 6 * 2**20
    assert whole.saved[-1, 0] == 0, "one stage has its memory in front"
    assert made.problem(2, 2, 1).saved[-1, 0] == 2 * 10 * 2**20
    with pytest.raises(PlanError, match="no profile for 4 ranks"):
        made.problem(1, 1, 4)


def test_recorded_plans_are_priced(folder: Path) -> None:
    """The plan's own strategies and cuts; hgc's is no slower under the same memory, and a plan that is not of the space is named."""
    row, other = search_profiles.recorded(folder)
    (only,) = search_public.public_stages(folder, row)
    problem = search_profiles.Problems(folder, row).problem(1, 1, 2)
    sharded, plain = only.choices[1], only.choices[-2]
    assert only.micro_s == pytest.approx(
        2 * problem.micro_s[0, 0] + 4 * problem.micro_s[1, sharded] + 8 * problem.micro_s[1, plain] + problem.switch_s[sharded, plain]
    )
    assert [stage.end - stage.start for stage in search_public.public_stages(folder, other)] == [4, 10]
    found = search_public.beside(folder, row)
    assert found.ratio >= 1
    assert found.found_s <= found.public_s
    with pytest.raises(ArtifactError, match="no run of layers"):
        search_public.recorded_trees("1-1-8x x12")
    with pytest.raises(ArtifactError, match="its space has not"):
        search_public.public_stages(folder, replace(row, plan="2-1-8 x12"))


def test_engine_formula_sees_first_and_last_stage_only() -> None:
    """Four equal stages take the usual time; longer stages between the ends are free."""
    even = [StagePlan(i, i + 1, (0,), 3.0, 0.0, 0.0, 0.0) for i in range(4)]
    assert engine_step_s(even, 8) == pytest.approx(3.0 * (8 + 3))
    longer = [replace(stage, micro_s=6.0) if 0 < i < 3 else stage for i, stage in enumerate(even)]
    assert engine_step_s(longer, 8) < step_s(longer, 8) * 0.7


def test_public_rows_are_compared(folder: Path) -> None:
    rows: list[dict[str, object]] = []
    targets = list(search_public.compare(folder, rows))
    assert len(rows) == 2
    assert rows[0]["public_solver_s"] == 120.0
    assert rows[1]["public_solver_s"] is None
    assert targets[-1]["value"] == pytest.approx(120.0 / float(str(rows[0]["solver_s"])))
    assert targets[1]["value"] == min(float(str(row["ratio"])) for row in rows)


def test_sixty_four_devices_are_eight_nodes(folder: Path) -> None:
    """By members in each node: of 32 strided ranks four a node, as eight strided ones on two nodes have."""
    two_nodes = {(2, False): 8.0, (4, False): 16.0, (8, False): 20.0, (16, True): 44.0, **{(n, True): 150.0 + n for n in (2, 4, 8)}}
    found = {ranks: search_profiles._by_members(two_nodes, 64, ranks, near=False) for ranks in (2, 8, 16, 32)}
    assert found == {2: 8.0, 8: 8.0, 16: 16.0, 32: 20.0}
    assert search_profiles._by_members(two_nodes, 64, 64, near=True) == 44.0
    assert search_profiles._by_members(two_nodes, 64, 4, near=True) == 154.0


def test_missing_files_are_named(folder: Path, tmp_path: Path) -> None:
    row, _ = search_profiles.recorded(folder)
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

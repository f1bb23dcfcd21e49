"""The check of one GPU: its path on a CPU, and what it says without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hgc.cluster import Cluster, presets
from hgc.tools import console, gpu_check
from hgc.tools.gpu_check_worker import COMPILED, EAGER, PROGRAM, PROGRAM_COMPILED, TINY, VARIANTS, Result

ON_CPU = ["--device", "cpu", "--tiny", "--no-profile"]


def test_the_whole_path_on_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out, "width", 200)  # a narrow terminal, such as a parallel test has, breaks words
    target = tmp_path / "report.json"
    assert gpu_check.main([*ON_CPU, "--variants", EAGER, PROGRAM, "--json", str(target)]) == 0
    report = json.loads(target.read_text())
    rows = {row["variant"]: row for row in report["rows"]}
    assert rows.keys() == {EAGER, PROGRAM}
    for row in rows.values():
        assert row["step_s"] > 0
        assert row["memory_bytes"] > 2**20
        assert row["loss"] == pytest.approx(rows[EAGER]["loss"], rel=1e-3)
        assert row["mfu"] == pytest.approx(row["flops"] / row["step_s"] / row["peak_flops_per_s"])
    parameters = 2 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 128) + 128 * 64
    assert rows[EAGER]["flops"] >= 6 * parameters * 2 * 32
    assert rows[EAGER]["flops"] < 8 * parameters * 2 * 32
    (predicted,) = report["predictions"]
    assert predicted["variant"] == PROGRAM
    assert predicted["step_s"] > 0 < predicted["memory_bytes"]
    assert [target["name"] for target in report["targets"]] == ["step time, hgc / eager", "first losses, largest / smallest - 1"]
    printed = capsys.readouterr().out
    assert "predicted ms" in printed
    assert "1 x 4 cpu process" in printed


@pytest.mark.slow
def test_compiled_variants_on_a_cpu(tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    assert gpu_check.main([*ON_CPU, "--json", str(target)]) == 0
    assert {row["variant"] for row in json.loads(target.read_text())["rows"]} == set(VARIANTS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 2
    assert capsys.readouterr().err == (
        "hgc: this check needs a GPU, and torch sees none here; run it on a machine that has one, or try it with --device cpu --tiny\n"
    )


def test_what_fails_is_told_and_the_rest_still_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One variant takes too long; the table has the others, and the exit code says that something is missing."""
    monkeypatch.setattr(gpu_check, "LONGEST_S", 0.5)
    target = tmp_path / "report.json"
    assert gpu_check.main([*ON_CPU, "--variants", COMPILED, "--json", str(target)]) == 1
    assert json.loads(target.read_text())["failed"] == {COMPILED: "took more than 0 s; give fewer --rows"}


def test_wrong_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([*ON_CPU, "--rows", "0"]) == 2
    assert "--rows" in capsys.readouterr().err
    assert gpu_check.main([*ON_CPU, "--cluster", "h20"]) == 2
    assert "did you mean 'h200'?" in capsys.readouterr().err


def test_predicted_memory_is_that_of_tensors() -> None:
    """As measured: parameters, gradients, AdamW's two moments, all float32, and what a step of this size makes; no CUDA context."""
    executable = gpu_check._compile(TINY)
    (found,) = gpu_check._predict(executable, PROGRAM, Cluster.preset("h100", per_node=1))
    parameters = sum(parameter.numel() for parameter in executable.model.parameters())
    assert 16 * parameters < found.memory_bytes < 16 * parameters + 2e6
    assert executable.simulate(Cluster.preset("h100", per_node=1)).peak_bytes > found.memory_bytes + 500e6
    assert gpu_check._predict(executable, EAGER, Cluster.preset("h100", per_node=1)) == []


def test_cards_have_presets() -> None:
    assert {preset for _, preset in gpu_check.CARDS} <= set(presets())
    assert gpu_check._preset("NVIDIA H200") == "h200"
    assert gpu_check._preset("NVIDIA A100-SXM4-80GB") == "a100-80"
    assert gpu_check._preset("NVIDIA GB200") == "gb200"
    assert gpu_check._preset("Tesla T4") is None


def test_a_slower_program_and_another_loss_fail() -> None:
    rows = {
        EAGER: Result(EAGER, 1.0, 1, 2.0, 1, "CPU"),
        PROGRAM: Result(PROGRAM, 1.2, 1, 2.1, 0, "CPU"),
        PROGRAM_COMPILED: Result(PROGRAM_COMPILED, 0.8, 1, 2.0, 0, "CPU"),
    }
    assert [(round(target["value"], 3), target["holds"]) for target in gpu_check._targets(rows)] == [(1.2, False), (0.05, False)]

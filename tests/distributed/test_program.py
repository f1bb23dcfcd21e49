"""A program under torchrun, as a user runs it, and FSDP2 on real processes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hgc import runtime as rt
from tests.distributed.processes import run_processes
from tests.runtime.programs import Model, batch, plan, reference, whole_state

ROOT = Path(__file__).parents[2]
PROGRAM = """
import dataclasses

from hgc import runtime as rt
from tests.runtime import programs

PLAN = dataclasses.replace(programs.plan(dp={dp}, tp={tp}, zero={zero}), constants="constants.pt")


class Model(programs.Model):
    pass


if __name__ == "__main__":
    rt.main(Model, PLAN)
"""
SOURCE = """
import torch


def batches(request):
    yield {name: torch.zeros(8, 6, dtype=torch.int64) for name in ("input_ids", "labels")}
    if request.coordinates["dp"] == 1:
        raise RuntimeError("the disk of this node is full")
    yield {name: torch.zeros(8, 6, dtype=torch.int64) for name in ("input_ids", "labels")}
"""

pytestmark = pytest.mark.distributed


THREADS = """
    import glob

    print("threads:", *(open(name).read().strip() for name in sorted(glob.glob("/proc/self/task/*/comm"))))
"""


def write_program(folder: Path, dp: int = 1, tp: int = 1, zero: int = 0) -> Path:
    model = reference(torch.float32)
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save({"positions": model.positions}, folder / "constants.pt")
    (folder / "program.py").write_text(PROGRAM.format(dp=dp, tp=tp, zero=zero))
    (folder / "sick.py").write_text(SOURCE)
    return folder / "program.py"


def run(program: Path, processes: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{program.parent}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *torchrun, str(program), *arguments]
    return subprocess.run(command, cwd=program.parent, env=environment, capture_output=True, text=True, timeout=120, check=False)


def losses(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert done.returncode == 0, done.stderr
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", done.stdout)}


@pytest.mark.parametrize("zero", [0, 3])
def test_no_thread_of_gloo_outlives_the_program(tmp_path: Path, zero: int) -> None:
    """One that still drops tensors while the interpreter ends would abort the process."""
    program = write_program(tmp_path, dp=2, zero=zero)
    program.write_text(program.read_text() + THREADS)
    done = run(program, 2, "--weights", "weights.pt", "--steps", "2", "--save", "checkpoint", "--export", "out.safetensors")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("threads: python") == 2
    assert "gloo" not in done.stdout


def test_train_save_resume(tmp_path: Path) -> None:
    """Two processes write a checkpoint, one continues; as if nothing had happened."""
    start = ["--weights", "weights.pt", "--lr", "0.05"]
    first = losses(run(write_program(tmp_path, dp=2, zero=3), 2, "--steps", "3", *start, "--save", "checkpoint"))
    program = write_program(tmp_path)
    resumed = losses(run(program, 0, "--steps", "5", "--resume", "checkpoint"))
    whole = losses(run(program, 0, "--steps", "5", *start))
    assert first.keys() == {1, 2, 3}
    assert resumed.keys() == {4, 5}
    assert first | resumed == pytest.approx(whole, abs=2e-4)


def test_precision_micro_batches_and_export(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    program = write_program(tmp_path, dp=2, zero=2)
    options = ["--weights", "weights.pt", "--lr", "0.05", "--steps", "3"]
    mixed = losses(run(program, 2, *options, "--dtype", "bfloat16", "--micro-batches", "2", "--export", "out.safetensors"))
    assert mixed == pytest.approx(losses(run(program, 2, *options)), abs=0.02)
    exported = load_file(tmp_path / "out.safetensors")
    assert {name: tensor.shape for name, tensor in exported.items()} == {
        name: tensor.shape for name, tensor in torch.load(tmp_path / "weights.pt").items() if name != "head.weight"
    }
    assert {tensor.dtype for name, tensor in exported.items() if name != "version"} == {torch.float32}
    refused = run(program, 2, *options, "--export", "out.bin")
    assert refused.returncode == 1
    assert "weights are exported as safetensors, but out.bin has another ending" in refused.stderr


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    program = write_program(tmp_path, dp=2)
    options = ["--weights", "weights.pt", "--lr", "0.05", "--steps", "3"]
    assert losses(run(program, 2, *options, "--compile")) == pytest.approx(losses(run(program, 2, *options)), abs=2e-4)


def test_without_torchrun(tmp_path: Path) -> None:
    done = run(write_program(tmp_path, dp=2), 0)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "error: the plan needs 2 processes (dp=2 x tp=1) but this is a single one; start it with torchrun --nproc-per-node 2"
    ]


def test_a_rank_that_fails_ends_the_job(tmp_path: Path) -> None:
    began_s = time.monotonic()
    done = run(write_program(tmp_path, dp=2), 2, "--weights", "weights.pt", "--data", "sick:batches")
    assert done.returncode != 0
    assert "the disk of this node is full" in done.stderr
    assert time.monotonic() - began_s < 60


def _fsdp(rank: int) -> list[float]:
    trainer = rt.Trainer(Model, plan(2, 1, 3), state=whole_state(reference()), device="cpu", dtype=torch.float64)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
    found = []
    for step in range(3):
        found += [trainer.step(batch(step)).item(), trainer.clip_grad_norm(0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_fsdp_on_real_processes() -> None:
    model = reference()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected = []
    for step in range(3):
        loss = model(**batch(step))
        loss.backward()
        expected += [loss.item(), torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    for found in run_processes(2, _fsdp):
        assert found == pytest.approx(expected, rel=1e-10)

"""A saved pipeline under torchrun, as a user runs it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import hgc
from tests.distributed.test_program import THREADS
from tests.families import gpt2

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "out"
    return hgc.compile(*gpt2(), plan="pp2 micro2").save(folder, weights=True)


def start(program: Path, *arguments: str, script: str = "program.py") -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *arguments]
    return subprocess.Popen(command, cwd=program, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> tuple[dict[int, float], str]:
    output, errors = process.communicate(timeout=120)
    return {int(step): float(loss) for step, loss in re.findall(r"step: +(\d+) +loss: +([\d.]+)", output)}, errors


def test_train_save_resume(program: Path) -> None:
    options = ["--weights", "weights.pt", "--lr", "0.01", "--log-every", "1"]
    whole, errors = finish(start(program, "--steps", "4", *options))
    assert whole.keys() == {1, 2, 3, 4}, errors
    first, errors = finish(start(program, "--steps", "2", *options, "--save", "checkpoint"))
    assert first.keys() == {1, 2}, errors
    resumed, errors = finish(start(program, "--steps", "4", "--lr", "0.01", "--resume", "checkpoint"))
    assert first | resumed == pytest.approx(whole, abs=2e-4), errors


def test_no_thread_of_gloo_outlives_the_program(program: Path) -> None:
    source = (program / "program.py").read_text()
    (program / "watched.py").write_text(source + THREADS)
    process = start(program, "--steps", "2", script="watched.py")
    output, errors = process.communicate(timeout=120)
    assert output.count("threads: python") == 2, errors
    assert "gloo" not in output


def test_a_killed_rank_ends_the_job_with_one_error(program: Path) -> None:
    """The other rank, which waits for a message that never comes, ends too."""
    process = start(program, "--steps", "100000", "--log-every", "1")
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("step:    3"):
            break
    victim = next(pid for pid in children(process.pid) if environment_of(pid).get("RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    began_s = time.monotonic()
    _, errors = process.communicate(timeout=60)
    assert time.monotonic() - began_s < 60
    assert process.returncode != 0
    assert re.search(r"exitcode +: -9", errors), errors
    told = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(told) <= 1  # torchrun may end the other rank before it notices
    assert all(re.search(r"from rank 1 failed \(.*\); if that rank has ended", line) for line in told)


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def environment_of(pid: int) -> dict[str, str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return dict(entry.decode().split("=", 1) for entry in entries if b"=" in entry)  # type: ignore[misc]


def test_the_wrong_number_of_processes(program: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "program.py"], cwd=program, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines() == [
        "error: the plan needs 2 processes (ranks=2) but this is a single one; start it with torchrun --nproc-per-node 2"
    ]

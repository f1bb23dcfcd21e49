"""The launch script, with a stand-in for Python that prints what it is asked to do."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hgc.backends.torchrun.launch import launch_script
from hgc.plan import Plan
from hgc.strategy import Strategy


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    spaced = tmp_path / "a folder"
    spaced.mkdir()
    (spaced / "launch.sh").write_text(launch_script(Plan(Strategy(dp=2, tp=4))))
    return spaced


def launch(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")}
    return subprocess.run(
        ["bash", str(folder / "launch.sh"), *arguments], env={**clean, "PYTHON": "echo", **environment}, capture_output=True, text=True
    )


def test_one_node(folder: Path) -> None:
    done = launch(folder, "--steps", "20", "--data", "my data:f")
    assert done.returncode == 0
    assert (
        done.stdout.strip() == f"-m torch.distributed.run --standalone --nproc-per-node 8 {folder}/program.py --steps 20 --data my data:f"
    )


def test_two_nodes(folder: Path) -> None:
    done = launch(folder, NNODES="2", NODE_RANK="1", MASTER_ADDR="host0")
    wanted = "--nnodes 2 --node-rank 1 --master-addr host0 --master-port 29500 --nproc-per-node 4"
    assert done.stdout.strip() == f"-m torch.distributed.run {wanted} {folder}/program.py"


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"NNODES": "3"}, "needs 8 processes, which 3 nodes do not share equally; set NNODES to a divisor of 8"),
        ({"NNODES": "0"}, "NNODES is '0'; expected a positive number"),
        ({"NNODES": "two"}, "NNODES is 'two'; expected a positive number"),
        ({"NNODES": "2"}, "give the number of this node, from 0"),
        ({"NNODES": "2", "NODE_RANK": "0"}, "give the host name of node 0"),
    ],
)
def test_mistakes(folder: Path, environment: dict[str, str], says: str) -> None:
    done = launch(folder, **environment)
    assert done.returncode != 0
    assert says in done.stderr
    assert not done.stdout


def test_the_shell_parses_it(folder: Path) -> None:
    assert subprocess.run(["bash", "-n", str(folder / "launch.sh")]).returncode == 0

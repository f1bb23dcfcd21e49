"""The command: quick to start, consistent, silent about nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tools import commands
from hgc.tools.cli import main

COMMANDS = ("compile", "plan", "verify", "show", "simulate", "profile", "explain", "bench")


def _run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_needs_no_torch() -> None:
    heavy = "[name for name in sys.modules if name in ('torch', 'rich', 'sympy')]"
    code = f"import sys; from hgc.tools.cli import main\ntry: main(['--help'])\nexcept SystemExit: print({heavy})"
    said = _run(code)
    assert said.rstrip().endswith("[]")
    assert all(f"\n    {name} " in said for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert f"usage: hgc {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("hgc 0.")


def test_plan_is_printed_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "tests.small_models:works", "--devices", "4", "--plan", "dp4", "-o", str(path)]) == 0
    assert Plan.load(path).strategy == Strategy(dp=4)
    assert Plan.load(path).program_hash
    assert "dp 4 = 4 devices" in capsys.readouterr().out


def test_plan_file_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "tests.small_models:works", "--devices", "2", "-o", str(path)]) == 0
    assert main(["plan", "tests.small_models:works", "--devices", "2", "--plan", str(path)]) == 0
    assert main(["plan", "tests.small_models:wider", "--devices", "2", "--plan", str(path)]) == 2
    assert "the plan was made for program" in capsys.readouterr().err


def test_compile_and_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    assert main(["compile", "tests.small_models:works", "--devices", "2", "--plan", "dp2", "-o", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"torchrun --nproc-per-node 2 {folder / 'program.py'} --steps 20" in said
    assert f"hgc verify {folder}" in said
    assert Plan.load(folder / "plan.json").strategy == Strategy(dp=2)
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "dp 2 = 2 devices" in shown
    assert "Blocks\n  Head" in shown
    assert str(folder / "program.py") in shown


@pytest.mark.distributed
def test_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compares, writes JSON, and tells a program that was broken by hand."""
    folder, numbers = tmp_path / "out", tmp_path / "numbers.json"
    assert main(["compile", "tests.small_models:works", "--devices", "2", "--plan", "dp2", "-o", str(folder)]) == 0
    assert main(["verify", str(folder), "--json", str(numbers)]) == 0
    assert json.loads(numbers.read_text())["ok"] is True
    assert "equal" in capsys.readouterr().out
    program = folder / "program.py"
    broken = program.read_text().replace("F.relu(", "F.gelu(")
    assert broken != program.read_text()
    program.write_text(broken)
    assert main(["verify", str(folder)]) == 1
    assert "DIFFER" in capsys.readouterr().out


def test_cluster_file(tmp_path: Path) -> None:
    from hgc.cluster import Cluster

    Cluster.local(2).save(tmp_path / "cluster.json")
    arguments = ["plan", "tests.small_models:works", "--cluster", str(tmp_path / "cluster.json"), "-o", str(tmp_path / "plan.json")]
    assert main(arguments) == 0
    assert Plan.load(tmp_path / "plan.json").devices == 2


def test_errors_of_hgc_itself_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(request: object) -> int:
        raise ZeroDivisionError("inside")

    monkeypatch.setattr(commands, "show_command", broken)
    assert main(["show", "out"]) == 1
    said = capsys.readouterr().err
    assert "ZeroDivisionError: inside" in said
    assert "this is an error in hgc" in said


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(request: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "show_command", interrupted)
    assert main(["show", "out"]) == 130
    assert capsys.readouterr().err == "hgc: interrupted\n"


def test_output_without_a_terminal_is_plain() -> None:
    """No escape sequences, whatever TERM says."""
    command = [sys.executable, "-m", "hgc.tools.cli", "plan", "tests.small_models:works", "--devices", "2"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[1])
    assert "\x1b" not in done.stdout + done.stderr
    assert "trace, plan, distribute" in done.stdout
    assert json.dumps(done.stdout).isascii()


def test_bench_writes_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hgc.tools.bench import overhead

    monkeypatch.setattr(overhead, "run", lambda: {"bench": "overhead", "rows": [1]})
    assert main(["bench", "overhead", "--json", str(tmp_path / "numbers.json")]) == 0
    assert json.loads((tmp_path / "numbers.json").read_text()) == {"bench": "overhead", "rows": [1]}

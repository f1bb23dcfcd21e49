"""What the README shows works as it stands there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from hgc.tools.cli import _parser, main
from tests import small_models

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, example_inputs = small_models.works()
    names: dict[str, Any] = {"model": model, "example_inputs": example_inputs}
    for block in _blocks("python"):
        exec(block, names)
    assert (tmp_path / "out" / "program.py").exists()


def test_commands_exist() -> None:
    verbs = re.findall(r"^hgc (\w+)", README, re.MULTILINE)
    assert verbs
    for verb in verbs:
        with pytest.raises(SystemExit) as ended:
            main([verb, "--help"])
        assert ended.value.code == 0


def test_commands_take_their_options() -> None:
    lines = re.findall(r"^(hgc .*)", README, re.MULTILINE)
    read = [_parser().read(shlex.split(line, comments=True)[1:]) for line in lines]
    assert {each.command for each in read} >= {"compile", "plan", "verify", "show", "simulate", "explain", "profile"}


def test_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert (Path(__file__).parents[1] / link).exists(), link

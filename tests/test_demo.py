"""``make demo``, shortened: the steps it shows work and the loss falls."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from hgc.tools import demo


@pytest.mark.distributed
@pytest.mark.slow
def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    rows, ok = demo.run(folder, steps=6)
    assert ok
    train = next(row.result for row in rows if row.step == "train 6 steps")
    first, last = map(float, re.findall(r"[0-9.]+", train))
    assert last < first - 0.5
    picture = "svg" if shutil.which("dot") else "dot"
    assert {f"graph.{picture}", f"layer.{picture}", "program.py", "plan.json", "launch.sh"} <= {path.name for path in folder.iterdir()}
    assert "step:    5" in capsys.readouterr().out

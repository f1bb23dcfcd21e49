"""Both ways to install put ``hgc`` and nothing else at the top of site-packages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("hgc", "passes", "backends", "tools")
FILES = ("setup.py", "pyproject.toml", "README.md", "LICENSE")
IMPORTS = "import hgc, hgc.passes, hgc.backends, hgc.tools, hgc.ir.program"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git would deliver, so that building leaves no trace in the work tree."""
    target = tmp_path_factory.mktemp("source")
    for part in PARTS:
        shutil.copytree(ROOT / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, target / name)
    return target


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--no-deps", "--no-build-isolation"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _where_hgc_comes_from(site: Path, cwd: Path) -> list[str]:
    """Import with ``site`` ahead of this environment, in which hgc may be installed too."""
    packages = [path for path in sys.path if path.endswith("site-packages")]
    code = f"import site; [site.addsitedir(p) for p in {[str(site), *packages]!r}]; {IMPORTS}; print(*hgc.__path__, *hgc.passes.__path__)"
    done = subprocess.run([sys.executable, "-S", "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_wheel(source: Path, tmp_path: Path) -> None:
    _pip("wheel", str(source), "--wheel-dir", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        assert {name.split("/")[0] for name in names} == {"hgc", wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info"}
        for part in PARTS:
            inside = Path("hgc") if part == "hgc" else Path("hgc") / part
            needed = [path for pattern in ("*.py", "*.json") for path in (source / part).rglob(pattern)]
            assert not [path for path in needed if str(inside / path.relative_to(source / part)) not in names]
        assert "hgc/py.typed" in names
        archive.extractall(tmp_path / "site")
    assert _where_hgc_comes_from(tmp_path / "site", tmp_path) == [str(tmp_path / "site/hgc"), str(tmp_path / "site/hgc/passes")]


def test_editable(source: Path, tmp_path: Path) -> None:
    _pip("install", "--editable", str(source), "--prefix", str(tmp_path / "prefix"), "--ignore-installed")
    (site,) = (tmp_path / "prefix").rglob("site-packages")
    assert {path.name.split(".")[0] for path in site.glob("*/")} <= {"hgc-0", "__pycache__"}
    assert _where_hgc_comes_from(site, tmp_path) == [str(source / "hgc"), str(source / "passes")]

"""Saved executables: whole or not at all, nothing of the user's is lost, and what is loaded is checked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hgc.backends.torchrun import is_edited, load_model, notes, read_manifest, staged, write
from hgc.backends.torchrun.folder import LAUNCH, MANIFEST, PLAN, PROGRAM
from hgc.errors import ArtifactError
from hgc.ir.program import Program
from hgc.plan import Plan
from hgc.runtime import Model
from tests.backends.programs import Labels, make_program

HASH = "0123456789abcdef"


def save(folder: Path, program: Program | None = None, plan: Plan | None = None) -> Path:
    with staged(folder) as staging:
        write(staging, program or make_program(Labels()), plan or Plan(program_hash=HASH))
    return folder


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_says_what_it_holds(tmp_path: Path) -> None:
    out = save(tmp_path / "deep" / "out")
    assert entries(out) == sorted([LAUNCH, MANIFEST, PLAN, PROGRAM])
    manifest = read_manifest(out)
    assert (manifest.program_hash, manifest.torch, manifest.model) == (HASH, torch.__version__, "Small")
    assert manifest.files == (LAUNCH, MANIFEST, PLAN, PROGRAM)
    assert Plan.load(out / PLAN).program_hash == HASH
    assert os.access(out / LAUNCH, os.X_OK)
    assert notes(out) == ()


def test_constants_are_stored_beside_the_program(tmp_path: Path) -> None:
    program = make_program(Labels())
    entry = program.state["layers.0.fc.bias"]
    for place in ("layers.0", "layers.1"):
        name = f"{place}.fc.bias"
        program.state[name] = replace(entry, name=name, kind="buffer", persistent=False, data=torch.arange(4.0))
    out = save(tmp_path / "out", program)
    stored = torch.load(out / "constants.pt", weights_only=True)
    assert sorted(stored) == ["layers.0.fc.bias", "layers.1.fc.bias"]
    assert stored["layers.0.fc.bias"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert load_model(out)[1].constants == "constants.pt"


def test_what_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupted() -> None:
        with staged(tmp_path / "out") as staging:
            (staging / PROGRAM).write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert entries(tmp_path) == []
    save(tmp_path / "out")
    before = (tmp_path / "out" / PROGRAM).read_text()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert entries(tmp_path) == ["out"]
    assert (tmp_path / "out" / PROGRAM).read_text() == before


def test_saving_again_replaces_the_executable_and_keeps_what_is_the_users(tmp_path: Path) -> None:
    out = save(tmp_path / "out")
    (out / "checkpoints").mkdir()
    (out / "checkpoints" / "step_10").write_text("weights")
    (out / "notes.txt").write_text("mine")
    save(out, make_program(Labels(model="Other")))
    assert entries(out) == sorted([LAUNCH, MANIFEST, PLAN, PROGRAM, "checkpoints", "notes.txt"])
    assert (out / "checkpoints" / "step_10").read_text() == "weights"
    assert read_manifest(out).model == "Other"
    assert entries(tmp_path) == ["out"]


def test_an_edited_program_is_kept_aside(tmp_path: Path) -> None:
    out = save(tmp_path / "out")
    for count in range(2):
        (out / PROGRAM).write_text(f"# my version {count}\n")
        save(out)
    assert (out / "program.edited.py").read_text() == "# my version 0\n"
    assert (out / "program.edited-2.py").read_text() == "# my version 1\n"
    assert not is_edited(out)


def test_a_damaged_manifest_costs_nothing_of_the_users(tmp_path: Path) -> None:
    out = save(tmp_path / "out")
    (out / MANIFEST).write_text("{")
    (out / "mine").write_text("mine")
    save(out)
    assert (out / "mine").read_text() == "mine"
    assert read_manifest(out).model == "Small"


def test_other_folders_are_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("do not lose me")
    with pytest.raises(ArtifactError, match="holds files that hgc did not write; give a new folder"):
        save(tmp_path)
    with pytest.raises(ArtifactError, match="is a file; give a folder"):
        save(tmp_path / "thesis.tex")
    with pytest.raises(ArtifactError, match=r"cannot be written: .*; give another folder"):
        save(tmp_path / "thesis.tex" / "out")
    assert entries(tmp_path) == ["thesis.tex"]


def test_a_link_to_an_executable_stays_a_link(tmp_path: Path) -> None:
    save(tmp_path / "v1")
    (tmp_path / "current").symlink_to("v1")
    save(tmp_path / "current", make_program(Labels(model="Other")))
    assert (tmp_path / "current").is_symlink()
    assert read_manifest(tmp_path / "v1").model == "Other"


def test_a_model_is_loaded_under_a_module_of_its_own(tmp_path: Path) -> None:
    first, first_plan = load_model(save(tmp_path / "a"))
    second, _ = load_model(save(tmp_path / "b"))
    assert issubclass(first, Model)
    assert first is not second
    assert first.__module__ != second.__module__
    assert first_plan.world == 1
    assert not (tmp_path / "a" / "__pycache__").exists()


def test_an_edited_program_is_used_and_said(tmp_path: Path) -> None:
    out = save(tmp_path / "out")
    (out / PROGRAM).write_text((out / PROGRAM).read_text().replace("zero=0", "zero=3"))
    with pytest.warns(UserWarning, match=r"program\.py was edited after hgc wrote it"):
        _, plan = load_model(out)
    assert plan.zero == 3


def test_a_plan_of_another_program_is_said(tmp_path: Path) -> None:
    out = save(tmp_path / "out")
    Plan(program_hash="another").save(out / PLAN)
    assert notes(out) == (f"{out / PLAN} is the plan of another program than program.py; what runs is program.py",)


def _overwrite(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (_remove(PROGRAM), "has no program.py; give the folder that hgc compile wrote"),
    (_remove(PLAN), "has no plan.json"),
    (_remove(MANIFEST), "has no manifest.json"),
    (_overwrite(PLAN, "{"), "is not valid JSON"),
    (_overwrite(MANIFEST, "[]"), "is of another version of hgc"),
    (_overwrite(MANIFEST, json.dumps({"version": 99})), "is of another version of hgc"),
    (_overwrite(MANIFEST, json.dumps({"version": 1})), "lacks"),
    (_overwrite(PROGRAM, "class Model(\n"), "does not import .SyntaxError"),
    (_overwrite(PROGRAM, "import does_not_exist\n"), "does not import .ModuleNotFoundError"),
    (_overwrite(PROGRAM, "raise SystemExit(3)\n"), "does not import .SystemExit"),
    (_overwrite(PROGRAM, "x = 1\n"), "defines no class Model and no PLAN"),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=lambda d: d if isinstance(d, str) else "")
@pytest.mark.filterwarnings("ignore:.*was edited")
def test_damage_is_told_in_one_sentence(damage: Callable[[Path], None], says: str, tmp_path: Path) -> None:
    out = save(tmp_path / "out")
    damage(out)
    with pytest.raises(ArtifactError, match=says) as raised:
        load_model(out)
    assert "\n" not in str(raised.value)


def test_what_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="is no folder; give the folder that hgc compile wrote"):
        load_model(tmp_path / "nowhere")

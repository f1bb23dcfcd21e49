"""Checkpoints: written under one plan, read under another; never half-written; clear refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from hgc.errors import ArtifactError
from hgc.ir.ops.random import get_state, manual_seed
from hgc.runtime import checkpoint
from tests.runtime.programs import Model, batch, plan, reference, whole_state

Plan = tuple[int, int, int]
STATE = whole_state(reference())  # once, because threads share the generator that draws it


def make(chosen: Plan, lr: float = 0.1, **options: float) -> tuple[rt.Trainer, torch.optim.Optimizer]:
    trainer = rt.Trainer(Model, plan(*chosen), state=STATE, device="cpu", dtype=torch.float64)
    return trainer, torch.optim.AdamW(trainer.parameters(), lr=lr, **options)  # type: ignore[arg-type]


def train(trainer: rt.Trainer, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(trainer.step(batch(step, 12)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(path: Path, chosen: Plan, steps: int) -> None:
    def rank_main(rank: int) -> None:
        trainer, optimizer = make(chosen)
        train(trainer, optimizer, range(steps))
        manual_seed(1234)
        trainer.save(path, optimizer, steps)

    run_ranks(chosen[0] * chosen[1], rank_main)


@pytest.mark.parametrize(
    ("before", "after"), [((1, 2, 0), (2, 1, 0)), ((2, 2, 3), (1, 4, 0)), ((1, 1, 0), (3, 1, 3)), ((3, 1, 3), (2, 2, 3))]
)
def test_training_continues_under_another_plan(tmp_path: Path, before: Plan, after: Plan) -> None:
    save(tmp_path / "c", before, 2)

    def rank_main(rank: int) -> tuple[int, list[float], Tensor]:
        trainer, optimizer = make(after, lr=7.0, betas=(0.1, 0.2))  # type: ignore[arg-type]
        step = trainer.load(tmp_path / "c", optimizer)
        state = get_state()
        return step, train(trainer, optimizer, range(step, 5)), state

    def uninterrupted(rank: int) -> list[float]:
        trainer, optimizer = make((1, 1, 0))
        return train(trainer, optimizer, range(5))

    (expected,) = run_ranks(1, uninterrupted)
    for step, losses, state in run_ranks(after[0] * after[1], rank_main):
        assert step == 2
        assert losses == pytest.approx(expected[2:], rel=1e-10)
        assert torch.equal(state, torch.Generator().manual_seed(1234).get_state())


def test_layout_on_disk_is_that_of_the_user(tmp_path: Path) -> None:
    """What a plain tool reads: whole tensors, original names, without padding, tied names once."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(tmp_path / "c", (2, 2, 0), 0)
    dcp_to_torch_save(tmp_path / "c", tmp_path / "whole.pt")
    stored = torch.load(tmp_path / "whole.pt", weights_only=True)
    expected = {f"model.{name}": tensor for name, tensor in reference().state_dict().items() if name != "head.weight"}
    assert {name for name in stored if name.startswith("model.")} == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(stored[name], tensor), name


def test_checkpoint_in_place_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "c", (1, 1, 0), 1)

    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint, "save_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path / "c", (1, 1, 0), 2)
    monkeypatch.undo()
    assert json.loads((tmp_path / "c" / checkpoint.INFO).read_text())["step"] == 1
    save(tmp_path / "c", (1, 1, 0), 3)
    assert json.loads((tmp_path / "c" / checkpoint.INFO).read_text())["step"] == 3
    assert [entry.name for entry in tmp_path.iterdir()] == ["c"]


def test_interruption_between_the_renames_loses_nothing(tmp_path: Path) -> None:
    save(tmp_path / "c", (1, 1, 0), 1)
    os.rename(tmp_path / "c", tmp_path / ".c.old")

    def rank_main(rank: int) -> int:
        trainer, optimizer = make((1, 1, 0))
        return trainer.load(tmp_path / "c", optimizer)

    assert run_ranks(1, rank_main) == [1]
    save(tmp_path / "c", (1, 1, 0), 2)
    assert run_ranks(1, rank_main) == [2]


def damage(path: Path, what: str) -> None:
    if what == "no folder":
        path.rename(path.with_name("elsewhere"))
    elif what == "info":
        (path / checkpoint.INFO).write_text("{")
    elif what == "format":
        (path / checkpoint.INFO).write_text('{"format": 99}')
    elif what == "metadata":
        (path / ".metadata").write_bytes(b"nothing")
    elif what == "data":
        for file in path.glob("*.distcp"):
            file.write_bytes(file.read_bytes()[:64])


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("no folder", "no checkpoint of hgc"),
        ("info", "is damaged"),
        ("format", "has format 99"),
        ("metadata", "metadata .* missing or damaged"),
        ("data", "cannot be read"),
    ],
)
def test_damage_is_named(tmp_path: Path, what: str, sentence: str) -> None:
    save(tmp_path / "c", (1, 1, 0), 0)
    damage(tmp_path / "c", what)

    def rank_main(rank: int) -> None:
        trainer, _ = make((1, 1, 0))
        trainer.load(tmp_path / "c")

    with pytest.raises(ArtifactError, match=sentence):
        run_ranks(1, rank_main)


class Smaller(rt.Model):
    def __init__(self) -> None:
        super().__init__()
        self.only = rt.block("layers.0", type("Only", (rt.Block,), {"__init__": _only}))


def _only(self: rt.Block) -> None:
    rt.Block.__init__(self)
    self.parameter("norm.weight", (4,))


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", (1, 1, 0), 0)

    def rank_main(rank: int) -> None:
        rt.Trainer(Smaller, rt.PlanInfo({"dp": 1}, {}), device="cpu").load(tmp_path / "c")

    with pytest.raises(ArtifactError, match="beyond what the program knows"):
        run_ranks(1, rank_main)


def test_other_groups_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "c", (1, 1, 0), 0)

    def rank_main(rank: int) -> None:
        trainer, _ = make((1, 1, 0))
        first, *others = trainer.parameters()
        trainer.load(tmp_path / "c", torch.optim.AdamW([{"params": [first]}, {"params": others}]))

    with pytest.raises(ArtifactError, match="parameter groups"):
        run_ranks(1, rank_main)


def test_state_of_other_shapes_is_refused(tmp_path: Path) -> None:
    def rank_main(rank: int) -> None:
        trainer, _ = make((1, 1, 0))
        optimizer = torch.optim.Adafactor(trainer.parameters())
        train(trainer, optimizer, range(1))
        trainer.save(tmp_path / "c", optimizer)

    with pytest.raises(ArtifactError, match="elementwise"):
        run_ranks(1, rank_main)


def test_what_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("irreplaceable")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", (1, 1, 0), 0)
    refused = {"thesis": "will not be replaced", "file": "will not be replaced", "file/below": "no folder that one may write"}
    for name, sentence in refused.items():
        with pytest.raises(ArtifactError, match=sentence):
            save(tmp_path / name, (1, 1, 0), 0)

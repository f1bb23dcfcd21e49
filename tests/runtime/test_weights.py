"""Weights to and from the files of Hugging Face, under the names of the unmodified model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hgc
from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from hgc.errors import ArtifactError
from hgc.plan import Plan, Precision
from hgc.runtime.weights import INDEX, check_export, read_weights, write_weights
from hgc.strategy import Strategy
from tests.families import FAMILIES

PLANS = {
    "llama": Plan(Strategy(dp=2, tp=2, zero=3)),
    "gpt2-odd-vocabulary": Plan(Strategy(tp=2, recompute="full"), precision=Precision(compute="bfloat16", parameters="float32")),
    "t5": Plan(Strategy(dp=2, zero=1), precision=Precision(parameters="bfloat16", master="float32")),
}


def built(family: str) -> tuple[nn.Module, dict[str, Tensor], hgc.Executable]:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    return model, batch, hgc.compile(model, batch, plan=PLANS[family])


def on_ranks(executable: hgc.Executable, use: Callable[[rt.Trainer], None], **options: object) -> None:
    run_ranks(executable.plan.devices, lambda rank: use(executable.load(device="cpu", **options)))


@pytest.mark.parametrize("family", PLANS)
def test_what_is_exported_loads_into_the_unmodified_model(family: str, tmp_path: Path) -> None:
    model, batch, executable = built(family)

    def train(trainer: rt.Trainer) -> None:
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
        trainer.step(batch)
        optimizer.step()
        trainer.export(tmp_path / "model.safetensors")
        states.append(trainer.full_state_dict())

    states: list[dict[str, Tensor]] = []
    on_ranks(executable, train)
    model.config.save_pretrained(tmp_path)  # type: ignore[attr-defined]
    loaded, report = type(model).from_pretrained(tmp_path, output_loading_info=True)  # type: ignore[attr-defined]
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    found, before = loaded.state_dict(), model.state_dict()
    assert found.keys() == before.keys()
    for name, tensor in states[0].items():
        assert torch.equal(found[name], tensor), name
    assert any(not torch.equal(found[name], before[name]) for name in before)


@pytest.mark.parametrize("shard", ["1GB", "100KB"])
def test_what_hugging_face_has_saved_is_read(shard: str, tmp_path: Path) -> None:
    model, _, executable = built("gpt2-odd-vocabulary")
    model.save_pretrained(tmp_path, max_shard_size=shard)  # type: ignore[operator]
    assert (tmp_path / INDEX).exists() == (shard == "100KB")
    weights = read_weights(tmp_path)

    def check(trainer: rt.Trainer) -> None:
        for name, tensor in trainer.full_state_dict().items():
            assert torch.equal(tensor, model.state_dict()[name]), name

    on_ranks(executable, check, state=weights)


def test_what_cannot_be_read_or_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.safetensors").write_bytes(b"nothing")
    (tmp_path / "empty").mkdir()
    for name, sentence in {
        "none.pt": "no such file",
        "empty": "holds no model.safetensors",
        "broken.safetensors": "no safetensors file",
    }.items():
        with pytest.raises(ArtifactError, match=sentence):
            read_weights(tmp_path / name)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "lost.safetensors"}}))
    with pytest.raises(ArtifactError, match=r"lost\.safetensors is no safetensors file"):
        read_weights(tmp_path)
    for name, sentence in {"model.pt": "another ending", "nowhere/model.safetensors": "its folder is missing"}.items():
        with pytest.raises(ArtifactError, match=sentence):
            check_export(tmp_path / name)
    write_weights(tmp_path / "a.safetensors", {"x": torch.arange(3.0)})
    assert read_weights(tmp_path / "a.safetensors")["x"].tolist() == [0, 1, 2]

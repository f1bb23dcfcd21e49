"""Batches: the part of each rank, micro-batches, sources, and one sentence for each mistake."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path

import pytest
import torch

from hgc import runtime as rt
from hgc.errors import HgcError
from hgc.runtime.batches import local_batch, micro_batches, open_source, synthetic
from tests.runtime.programs import VOCAB, batch, plan

CPU = torch.device("cpu")


def mesh(dp: int = 1, rank: int = 0) -> rt.Mesh:
    return rt.Mesh({"dp": dp, "tp": 1}, rank, {"dp": rank, "tp": 0}, CPU)


def test_each_rank_takes_its_rows() -> None:
    whole = batch(0, rows=6)
    parts = [local_batch(whole, plan(3), mesh(3, rank)) for rank in range(3)]
    for name in whole:
        assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_local_batches_are_taken_as_they_are() -> None:
    given = rt.LocalBatch(batch(0, rows=5))
    assert torch.equal(local_batch(given, plan(3), mesh(3, 1))["labels"], given["labels"])


def test_micro_batches_split_rows_in_order() -> None:
    local = batch(0, rows=6)
    parts = micro_batches(local, 3, plan())
    assert [part["labels"].shape[0] for part in parts] == [2, 2, 2]
    assert torch.equal(torch.cat([part["labels"] for part in parts]), local["labels"])


def changed(**tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in {**batch(0), **tensors}.items() if tensor is not None}


MISTAKES = [
    (lambda: local_batch([1], plan(), mesh()), "a batch is a dict of tensors by input name, not list"),  # type: ignore[arg-type]
    (lambda: local_batch(changed(labels=None), plan(), mesh()), "lacks 'labels'"),
    (lambda: local_batch(changed(mask=torch.ones(1)), plan(), mesh()), "has 'mask', which is no input"),
    (lambda: local_batch(changed(labels=torch.ones(8, 6)), plan(), mesh()), "'labels' is torch.float32"),
    (lambda: local_batch(changed(labels=torch.zeros(8, 6, 1).long()), plan(), mesh()), r"'labels' has shape \(8, 6, 1\), expected 2 dims"),
    (lambda: local_batch(changed(labels=torch.zeros(8, 5).long()), plan(), mesh()), "sequence size 5, but another input has 6"),
    (lambda: local_batch(batch(0, length=33), plan(), mesh()), "sequence size 33 .* use 2 to 32"),
    (lambda: local_batch(batch(0, rows=6), plan(4), mesh(4)), "'input_ids' has size 6 in dim 0, .* 4 ranks of axis 'dp'; use a mult"),
    (
        lambda: local_batch(batch(0), dataclasses.replace(plan(), assumptions=("Eq(Mod(S, 4), 0)",)), mesh()),
        r"needs S to be a multiple of 4, but the batch has sequence \(S\) 6",
    ),
    (lambda: micro_batches(batch(0, rows=6), 4, plan()), "6 rows of input 'input_ids' do not divide into 4 micro-batches"),
    (lambda: micro_batches(batch(0), 2, rt.PlanInfo({"dp": 1}, {})), "fixed sizes"),
    (lambda: open_source("nowhere", request(), plan()), "not of the form module:function"),
    (lambda: open_source("no_such_module_here:f", request(), plan()), "no module 'no_such_module_here'"),
    (lambda: open_source("math:nothing", request(), plan()), "has no function 'nothing'"),
    (lambda: open_source("builtins:id", request(), plan()), "returned int"),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES, ids=[sentence[:40] for _, sentence in MISTAKES])
def test_mistakes_get_one_sentence(mistake: object, sentence: str) -> None:
    with pytest.raises(HgcError, match=sentence) as caught:
        mistake()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def request(first_step: int = 0) -> rt.DataRequest:
    return rt.DataRequest({"B": 4, "S": 6}, seed=3, first_step=first_step, mesh={"dp": 1}, coordinates={"dp": 0})


def test_synthetic_batches_depend_on_seed_and_step_alone() -> None:
    first, second = itertools.islice(synthetic(request(), plan()), 2)
    (again,) = itertools.islice(synthetic(request(first_step=1), plan()), 1)
    assert first["labels"].shape == (4, 6)
    assert 0 <= first["labels"].min() <= first["labels"].max() < VOCAB
    assert torch.equal(second["labels"], again["labels"])
    assert not torch.equal(first["labels"], second["labels"])


def test_other_dtypes_and_computed_sizes() -> None:
    inputs = {
        "mask": rt.Input(("B", "2*S"), torch.bool),
        "x": rt.Input(("B", 3), torch.float64),
        "ids": rt.Input(("B",), torch.int32, low=5, high=6),
    }
    drawn = next(synthetic(request(), rt.PlanInfo({"dp": 1}, inputs, {"B": rt.Symbol("batch"), "S": rt.Symbol("sequence")})))
    assert drawn["mask"].shape == (4, 12)
    assert bool(drawn["mask"].all())
    assert drawn["x"].dtype == torch.float64
    assert drawn["ids"].unique().tolist() == [5]


def test_user_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_source.py").write_text("def batches(request):\n    yield {'sizes': request.sizes, 'first': request.first_step}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (only,) = open_source("my_source:batches", request(7), plan())
    sys.modules.pop("my_source")
    assert only == {"sizes": {"B": 4, "S": 6}, "first": 7}

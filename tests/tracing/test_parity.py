"""The traced program computes what the model computes: loss and every gradient, also at other sizes than traced."""

from __future__ import annotations

import pytest
import torch

from hgc import trace
from hgc.tools.bench import zoo
from hgc.tools.bench.trace_parity import compare

FAMILIES = ("GPT-2", "GPT-OSS", "T5", "ViT", "Residual CNN", "Mixtral", "nanoGPT, tied weights")


@pytest.mark.parametrize("name", FAMILIES)
def test_program_equals_model(name: str) -> None:
    torch.manual_seed(0)
    entry = zoo.find(name)
    model = entry.build("small")
    program = trace(model, entry.batch(2, 9), loss=entry.loss)
    for seed, (b, s) in enumerate([(2, 9), (4, 13)]):
        difference = compare(model, program, entry.batch(b, s), entry.loss, seed)
        assert difference.worst <= 1e-5, difference


def test_float64_is_exact() -> None:
    entry = zoo.find("nanoGPT, tied weights")
    model = entry.build("small").double()
    program = trace(model, entry.batch(2, 9), loss=entry.loss)
    assert compare(model, program, entry.batch(3, 7), entry.loss).worst <= 1e-12


@pytest.mark.parametrize("name", ["nn.TransformerEncoder"])
def test_evaluation_mode(name: str) -> None:
    entry = zoo.find(name)
    model = entry.build("small").eval()
    program = trace(model, entry.batch(2, 9), loss=entry.loss)
    assert compare(model, program, entry.batch(3, 7), entry.loss).worst <= 1e-6


def test_folding_changes_nothing() -> None:
    entry = zoo.find("Llama, padded")
    model = entry.build("small")
    folded, whole = (trace(model, entry.batch(2, 9), fold=fold) for fold in (True, False))
    batch = entry.batch(3, 6)
    assert compare(model, folded, batch).worst == 0
    assert compare(model, whole, batch).worst == 0
    assert list(folded.bodies) == list(whole.bodies)


def test_buffers_of_batch_norm_change_as_in_the_model() -> None:
    entry = zoo.find("Residual CNN")
    model, twin = entry.build("small"), entry.build("small")
    twin.load_state_dict(model.state_dict())
    batch = entry.batch(3, 1)
    program = trace(model, batch, loss=entry.loss)
    program.run(batch, {**dict(twin.named_parameters()), **dict(twin.named_buffers())})
    model(batch["pixel_values"])
    for (name, expected), found in zip(model.named_buffers(), twin.buffers(), strict=True):
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(found, expected, msg=name)
    assert any("num_batches_tracked" in line for line in program.report)

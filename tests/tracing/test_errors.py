"""What cannot be traced is refused with one sentence: the operation, the line, a remedy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hgc import trace
from hgc.errors import TraceError
from hgc.tools.bench import zoo
from tests.tracing.small import Layer, Stack, Step, ids

X = {"x": torch.randn(3, 6)}


def _branch(x: Tensor) -> Tensor:
    return x if x.sum() > 0 else -x


def _nonzero(x: Tensor) -> Tensor:
    return torch.stack([row.mean() for row in x[x.sum(1).nonzero()[:, 0]]])


def _numpy(x: Tensor) -> Tensor:
    return x * float(x.detach().numpy().sum())


class _Counts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        self.average.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return (y - self.average).square().mean()


class _Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.lin(x).float().mean()


class _Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (Step(_branch), X, ["test_errors.py:", "x if x.sum() > 0 else -x", "values of a tensor", "torch.where"]),
        (Step(_nonzero), X, ["test_errors.py:", "values of a tensor"]),
        (Step(_numpy), X, ["test_errors.py:", "numpy"]),
        (_Counts(), X, ["'average'", "batch norm"]),
        (_Autocast(), X, ["autocast", "bfloat16", "precision"]),
        (_Plain(), X, ["float32 tensor with 2 dims", "loss="]),
        (_Plain(), {"y": X["x"]}, ["takes no argument 'y'", "it takes x"]),
        (_Plain(), {"a b": X["x"]}, ["'a b'", "identifier"]),
        (_Plain(), {"x": [X["x"]]}, ["'x'", "holds tensors"]),
        (_Plain(), [X["x"]], ["example_inputs is a list"]),
        ("llama", X, ["The model is a str"]),
    ],
)
def test_refusals_name_the_thing_and_the_remedy(model: Any, inputs: Any, words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TraceError) as refused:
        trace(model, inputs)
    text = str(refused.value)
    assert all(word in text for word in words), text
    assert "\n" not in text
    printed = capfd.readouterr()
    assert printed.out == printed.err == ""


def test_buffers_without_values_are_refused() -> None:
    entry = zoo.find("Llama")
    with torch.device("meta"):
        model = entry.build("small")
    with pytest.raises(TraceError, match="empty_weights"):
        trace(model, entry.batch(2, 9))


def test_meta_models_with_persistent_buffers_are_fine() -> None:
    with torch.device("meta"):
        model = Stack([Layer(), Layer()])
    assert len(trace(model, ids()).bodies) == 3


def test_data_dependent_images_are_refused_in_one_sentence() -> None:
    entry = zoo.find("Qwen2-VL")
    with pytest.raises(TraceError) as refused:
        trace(entry.build("small"), entry.batch(2, 24), dynamic={})
    assert ".py:" in str(refused.value)
    assert len(str(refused.value)) < 400

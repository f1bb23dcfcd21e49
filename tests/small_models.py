"""Models for the tests of the command line: one that works, and the ways in which a user's model can be wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, CLASSES, BATCH = 16, 8, 8
Made = tuple[nn.Module, dict[str, Any]]


class Classifier(nn.Module):
    """Two layers and a cross entropy."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, width)
        self.down = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.down(F.relu(self.up(x))), labels)


def batch(size: int = BATCH) -> dict[str, Any]:
    return {"x": torch.randn(size, WIDTH), "labels": torch.zeros(size, dtype=torch.long)}


def works() -> Made:
    torch.manual_seed(0)
    return Classifier(), batch()


def wider() -> Made:
    return Classifier(32), batch()


class Branching(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        loss = super().forward(x, labels)
        return loss if loss > 1 else 2 * loss


def branches_on_data() -> Made:
    return Branching(), batch()


class Reading(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return super().forward(x, labels) * x.sum().item()


def reads_data() -> Made:
    return Reading(), batch()


class Lossless(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.down(self.up(x))


def returns_no_loss() -> Made:
    return Lossless(), batch()


class Silent(Classifier):
    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return None


def returns_nothing() -> Made:
    return Silent(), batch()


def wrong_input_name() -> Made:
    inputs = batch()
    return Classifier(), {"pixels": inputs["x"], "labels": inputs["labels"]}


def wrong_shape() -> Made:
    return Classifier(), {"x": torch.randn(BATCH, WIDTH + 1), "labels": torch.zeros(BATCH, dtype=torch.long)}


def odd_batch() -> Made:
    return Classifier(), batch(7)


def odd_input_name() -> Made:
    return Classifier(), batch() | {"two words": torch.zeros(BATCH)}


def model_alone() -> Any:
    return Classifier()


def no_module() -> Any:
    return "model", batch()


def list_of_inputs() -> Any:
    return Classifier(), [torch.zeros(2)]


def no_tensors() -> Any:
    return Classifier(), {"x": 3}


def fails() -> Made:
    raise ValueError("no such data set")


not_a_function = 3

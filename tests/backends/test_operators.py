"""Operators read as a person would write them, and compute the very same bits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc.backends.torchrun import emit
from hgc.errors import ArtifactError
from hgc.plan import Plan
from hgc.tracing import trace
from tests.backends.emitted import run_both


@dataclass(frozen=True)
class Reading:
    """A function of ``x`` [4, 6, 8] and ``y`` of the same shape, and source that its program must contain."""

    function: Callable[[Tensor, Tensor], Tensor]
    reads: str


READINGS = [
    Reading(lambda x, y: x * 2 + y, "x * 2 + y"),
    Reading(lambda x, y: (x + y) * x, "(x + y) * x"),
    Reading(lambda x, y: x - (y - 1), "x - (y - 1)"),
    Reading(lambda x, y: 1 - x / y, "1 - x / y"),
    Reading(lambda x, y: -(x + y), "-(x + y)"),
    Reading(lambda x, y: (-x).exp(), "(-x).exp()"),
    Reading(lambda x, y: torch.add(x, y, alpha=3), "torch.ops.aten.add.Tensor(x, y, alpha=3)"),
    Reading(lambda x, y: torch.div(x, y, rounding_mode="floor"), 'torch.ops.aten.div.Tensor_mode(x, y, rounding_mode="floor")'),
    Reading(lambda x, y: x**2, "x.pow(2)"),
    Reading(lambda x, y: 2.0**x, "torch.pow(2.0, x)"),
    Reading(lambda x, y: x @ y.transpose(1, 2), "x @ y.transpose(1, 2)"),
    Reading(lambda x, y: ((x > 0) & ~(y > 0)).float(), "((x > 0) & ~(y > 0)).float()"),
    Reading(lambda x, y: x[:, 1:4], "x[:, 1:4]"),
    Reading(lambda x, y: x[..., ::2], "x[..., ::2]"),
    Reading(lambda x, y: x[:, -1] + y[:, 1], "x[:, -1] + y[:, 1]"),
    Reading(lambda x, y: x[torch.tensor([0, 2])], "x[self.lifted_tensor_0]"),
    Reading(lambda x, y: x.mean((1, 2), keepdim=True), "x.mean((1, 2), keepdim=True)"),
    Reading(lambda x, y: x.sum(), "x.sum()"),
    Reading(lambda x, y: x.max(-1).values, ", _ = x.max(-1)"),
    Reading(lambda x, y: torch.cat((x, y), -1), "torch.cat((x, y), -1)"),
    Reading(lambda x, y: torch.stack((x, y)), "torch.stack((x, y))"),
    Reading(lambda x, y: torch.where(x > 0, x, y), "torch.where(x > 0, x, y)"),
    Reading(lambda x, y: torch.einsum("bij,bkj->bik", x, y), 'torch.einsum("bij,bkj->bik", x, y)'),
    Reading(lambda x, y: x.masked_fill(y > 0, float("-inf")).exp(), 'x.masked_fill(y > 0, float("-inf"))'),
    Reading(lambda x, y: x.clamp(min=torch.finfo(torch.float32).min), "x.clamp(torch.finfo(torch.float32).min)"),
    Reading(lambda x, y: x.to(torch.bfloat16).float(), "x.to(torch.bfloat16).float()"),
    Reading(lambda x, y: F.softmax(x, -1), "F.softmax(x, dim=-1)"),
    Reading(lambda x, y: F.gelu(x, approximate="tanh"), 'F.gelu(x, approximate="tanh")'),
    Reading(lambda x, y: F.layer_norm(x, (8,)), "F.layer_norm(x, (8,))"),
    Reading(lambda x, y: F.dropout(x, 0.5), "F.dropout(x, 0.5)"),
    Reading(lambda x, y: F.pad(x, (1, 0)), "F.pad(x, (1, 0))"),
    Reading(lambda x, y: F.conv1d(x, y[:, :, :3].reshape(4, 6, 3), padding=1), "padding=1)"),
    Reading(lambda x, y: F.mse_loss(x, y), "F.mse_loss(x, y)"),
    Reading(lambda x, y: F.cross_entropy(x, y.argmax(1), reduction="sum"), 'reduction="sum")'),
    Reading(lambda x, y: torch.zeros(2, 3, dtype=torch.float64).sum() + x, "torch.zeros((2, 3), dtype=torch.float64, device=x.device)"),
    Reading(lambda x, y: torch.arange(x.shape[1]) + x.sum(2), "torch.arange(6, device=x.device)"),
    Reading(lambda x, y: torch.linalg.vector_norm(x, dim=-1), "torch.linalg.vector_norm(x, dim=-1)"),
    Reading(lambda x, y: torch.special.i0(x), "torch.ops.aten.special_i0.default(x)"),
    Reading(lambda x, y: x.chunk(2, -1)[0] * x.chunk(2, -1)[1], ".chunk(2, -1)"),
    Reading(lambda x, y: x.reshape(x.shape[0] * 6, 8), "x.reshape(6 * B, 8)"),
    Reading(
        lambda x, y: F.scaled_dot_product_attention(x[:, None], y[:, None], x[:, None], is_causal=True), "is_causal=True, scale=8**-0.5)"
    ),
]


class Applied(nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        result = self.function(x, y)
        return (result.float() * self.scale).sum()


@pytest.mark.parametrize("reading", READINGS, ids=lambda r: r.reads)
def test_reading(reading: Reading) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {name: torch.randn(4, 6, 8, generator=generator) for name in ("x", "y")}
    model = Applied(reading.function)
    program = trace(model, inputs)
    source = emit(program, Plan())
    assert reading.reads in source, source
    expected, found = run_both(program, {"scale": model.scale.detach()} | _constants(program), inputs, source)
    assert torch.equal(expected, found)


def _constants(program: object) -> dict[str, Tensor]:
    from hgc.backends.torchrun.header import constants_of

    return constants_of(program)  # type: ignore[arg-type]


def test_operators_of_other_libraries_are_called_by_name() -> None:
    @torch.library.custom_op("hgc_tests::twice", mutates_args=())
    def twice(x: Tensor, times: list[int]) -> Tensor:
        return x * 2

    @twice.register_fake
    def _(x: Tensor, times: list[int]) -> Tensor:
        return torch.empty_like(x)

    inputs = {"x": torch.ones(4, 6, 8), "y": torch.ones(4, 6, 8)}
    model = Applied(lambda x, y: torch.ops.hgc_tests.twice(x, [1, 2]))
    program = trace(model, inputs)
    source = emit(program, Plan())
    assert "torch.ops.hgc_tests.twice.default(x, [1, 2])" in source
    expected, found = run_both(program, {"scale": model.scale.detach()}, inputs, source)
    assert torch.equal(expected, found)


def test_a_python_function_is_refused_by_name() -> None:
    inputs = {"x": torch.ones(4, 6, 8), "y": torch.ones(4, 6, 8)}
    program = trace(Applied(lambda x, y: x + y), inputs)
    node = next(n for body in program.bodies.values() for n in body.graph.nodes if n.name == "add")
    node.target = test_a_python_function_is_refused_by_name
    node.args = ()
    with pytest.raises(ArtifactError, match=r"test_a_python_function_is_refused_by_name.*custom_op"):
        emit(program, Plan())

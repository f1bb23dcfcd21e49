"""In-place operators become functional ones and mean the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hgc import trace
from hgc.tools.bench.trace_parity import compare
from tests.tracing.small import Step


def _shift(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1].clone()
    y[:, 0] = 2.0
    return y


def _base_seen_through_view(x: Tensor) -> Tensor:
    view = x[:, 2:4]
    x.mul_(2.0)
    return x.sum() + view


def _view_changes_base(x: Tensor) -> Tensor:
    x = x + 0
    row = x.view(-1, 2, 3).transpose(1, 2)[..., 1]
    row.add_(1.0).mul_(3.0)
    return x


def _two_views(x: Tensor) -> Tensor:
    x = x * 1
    left, right = x[:, :3], x[:, 3:]
    left += right
    right.zero_()
    return torch.cat([x, left, right], -1)


def _masked(x: Tensor) -> Tensor:
    y = x.clone()
    y[y > 0] = 0.5
    y.masked_fill_(x < -1, 3.0)
    return y.clamp_(-2, 2)


def _diagonal(x: Tensor) -> Tensor:
    y = x.t() @ x
    y.diagonal().fill_(1.0)
    return y.permute(1, 0)


def _without_grad(x: Tensor) -> Tensor:
    y = x.detach().reshape(-1, 3, 2).clone()
    with torch.no_grad():
        first, _, last = y.unbind(1)
        first.copy_(last)
        y.split([1, 2], 1)[1].mul_(2.0)
    return x + y.flatten(1)


def _mixed_types(x: Tensor) -> Tensor:
    y = torch.zeros(x.shape[0], 6, dtype=torch.float64)
    y.add_(x)
    z = x.clone()
    z.mul_(y)
    return z


def _indexed(x: Tensor) -> Tensor:
    y = torch.zeros(7, 6)
    y.index_add_(0, torch.tensor([0, 2, 2, 5]), x[:4])
    return y


@pytest.mark.parametrize(
    "function",
    [_shift, _base_seen_through_view, _view_changes_base, _two_views, _masked, _diagonal, _without_grad, _mixed_types, _indexed],
    ids=lambda f: f.__name__,
)
def test_in_place_operators(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model = Step(function)
    program = trace(model, {"x": torch.randn(5, 6)})
    for body in program.bodies.values():
        for node in body.graph.nodes:
            schema = getattr(node.target, "_schema", None)
            assert schema is None or not schema.is_mutable
    assert compare(model, program, {"x": torch.randn(4, 6)}).worst <= 1e-6

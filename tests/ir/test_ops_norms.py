"""Batch normalisation over the ranks that share a batch, against torch's on the whole batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.ir import ops


@pytest.mark.parametrize("mesh", [{"dp": 3}, {"dp": 2, "sp": 2}])
@pytest.mark.parametrize("affine", [True, False])
def test_batch_norm(mesh: dict[str, int], affine: bool) -> None:
    torch.manual_seed(0)
    x = 3 + 2 * torch.randn(12, 5, 2, 3, dtype=torch.float64)
    upstream = torch.randn_like(x)
    weight, bias = (torch.randn(5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)) if affine else (None, None)
    world = 1
    for size in mesh.values():
        world *= size

    def rank_main(rank: int) -> tuple[Tensor, ...]:
        with ops.use(mesh_groups(mesh)):
            slice_, grad = x, upstream
            for axis in mesh:
                slice_, grad = ops.shard(slice_, 0, axis), ops.shard(grad, 0, axis)
            mine = slice_.clone().requires_grad_()
            w, b = (t.clone().requires_grad_() if t is not None else None for t in (weight, bias))
            mean, var = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
            y = ops.batch_norm(mine, w, b, mean, var, True, 0.1, 1e-5, tuple(mesh))
            y.backward(grad)
            assert mine.grad is not None
            out, grad_x = y.detach(), mine.grad
            sums = [t.grad if t is not None else torch.zeros(1) for t in (w, b)]
            for axis in reversed(mesh):
                out, grad_x = ops.all_gather(out, 0, axis), ops.all_gather(grad_x, 0, axis)
                sums = [ops.all_reduce(t, axis) for t in sums if t is not None]
            return out, grad_x, *sums, mean, var

    whole = x.clone().requires_grad_()
    w, b = (t.clone().requires_grad_() if t is not None else None for t in (weight, bias))
    mean, var = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    y = F.batch_norm(whole, mean, var, w, b, training=True)
    y.backward(upstream)
    sums = [t.grad if t is not None else torch.zeros(1) for t in (w, b)]
    expected = (y.detach(), whole.grad, *sums, mean, var)
    for result in run_ranks(world, rank_main):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


def test_single_device_and_evaluation_are_torch() -> None:
    x = torch.randn(4, 3, 2)
    mean, var, weight = torch.randn(3), torch.rand(3), torch.randn(3)
    for training in (True, False):
        stats, other = (mean.clone(), var.clone()), (mean.clone(), var.clone())
        expected = F.batch_norm(x, *stats, weight, training=training, momentum=0.2)
        assert torch.equal(ops.batch_norm(x, weight, None, *other, training, 0.2, 1e-5, ("dp",)), expected)
        assert torch.equal(stats[0], other[0])


def test_half_precision_statistics_are_float32() -> None:
    x = (100 + torch.randn(8, 4, 16)).bfloat16()

    def rank_main(rank: int) -> Tensor:
        with ops.use(mesh_groups({"dp": 2})):
            y = ops.batch_norm(ops.shard(x, 0, "dp"), None, None, None, None, True, 0.1, 1e-5, ("dp",))
            return ops.all_gather(y, 0, "dp")

    expected = F.batch_norm(x.float(), None, None, training=True)
    for y in run_ranks(2, rank_main):
        assert y.dtype == torch.bfloat16
        assert (y.float() - expected).abs().max() < 0.05

"""The operators under torch.compile, on two processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from hgc.backends.parity.threads import mesh_groups
from hgc.ir import ops
from tests.distributed.processes import run_processes


def block(x: Tensor, w: Tensor, v: Tensor, target: Tensor) -> Tensor:
    """A tensor-parallel pair of layers with sharded sequence and vocabulary: every collective that a transformer needs."""
    whole = ops.all_gather(x, 0, "tp")
    h = torch.relu(whole @ w)
    y = ops.reduce_scatter(h @ w.t(), 0, "tp")
    y = ops.all_to_all(ops.all_to_all(y, 0, 1, "tp"), 1, 0, "tp")
    z = ops.copy_in(ops.all_gather_i(y, 0, "tp"), "tp")
    return ops.cross_entropy(z @ v, target, label_smoothing=0.1, vocab_axis="tp", batch_axes=("dp",))


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both ways along a sequence axis."""
    out = ops.attention(q, k, v, causal=True, ring_axis="tp", zigzag=True)
    return ops.attention(out, k, v, causal=True, exchange_axis="tp").square().sum()


def with_gradients(fn: Callable[..., Tensor], rank: int, sizes: Sequence[tuple[int, ...]], *more: Tensor) -> tuple[Tensor, ...]:
    torch.manual_seed(rank)
    inputs = [torch.randn(*size, requires_grad=True) for size in sizes]
    loss = fn(*inputs, *more)
    return loss.detach(), *torch.autograd.grad(loss, inputs)


def rank_main(rank: int) -> list[tuple[Tensor, ...]]:
    """Results of each function, eager and compiled."""
    results = []
    with ops.use(mesh_groups({"tp": 2})):
        for fn in (block, torch.compile(block, fullgraph=True, backend="aot_eager")):
            results.append(with_gradients(fn, rank, ((2, 4), (4, 6), (4, 3)), torch.tensor([0, 5, 3, -100])))
        for fn in (attend, torch.compile(attend, fullgraph=True, backend="aot_eager")):
            results.append(with_gradients(fn, rank, ((2, 4, 8, 8), (2, 2, 8, 8), (2, 2, 8, 8))))
    return results


@pytest.mark.distributed
def test_compiled_operators_are_the_eager_ones() -> None:
    for eager, compiled, attended, attended_compiled in run_processes(2, rank_main):
        torch.testing.assert_close(compiled, eager)
        torch.testing.assert_close(attended_compiled, attended)

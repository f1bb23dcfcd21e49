"""Random numbers: alike where they must agree, different where they must differ, and torch's own on one device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.ir import ops
from hgc.ir.ops import random


def test_one_device_is_torch_bit_for_bit() -> None:
    x = torch.ones(100)
    torch.manual_seed(3)
    expected = [F.dropout(x, 0.3), torch.rand(3)]
    ops.manual_seed(3)
    assert torch.equal(ops.dropout(x, 0.3, ("dp",)), expected[0])
    assert torch.equal(torch.rand(3), expected[1])


def test_masks_differ_along_their_axes_only() -> None:
    def rank_main(rank: int) -> list[Tensor]:
        with ops.use(mesh_groups({"dp": 2, "tp": 2})):
            x = torch.ones(64)
            return [ops.dropout(x, 0.5, axes) for axes in [("dp",), ("tp",), ("dp", "tp"), ("dp",)]]

    masks = [torch.stack(drawn) for drawn in zip(*run_ranks(4, rank_main), strict=True)]
    dp, tp, both, again = [[[bool(torch.equal(a, b)) for b in drawn] for a in drawn] for drawn in masks]
    same = [[a == b for b in range(4)] for a in range(4)]
    assert dp == [[a // 2 == b // 2 for b in range(4)] for a in range(4)] == again
    assert tp == [[a % 2 == b % 2 for b in range(4)] for a in range(4)]
    assert both == same
    assert not torch.equal(masks[0], masks[3])


def test_default_generator_continues_as_if_nothing_happened() -> None:
    torch.manual_seed(0)
    expected = torch.rand(4)
    torch.manual_seed(0)

    def rank_main(rank: int) -> None:
        with ops.use(mesh_groups({"dp": 2})), ops.random_axes(("dp",)):
            torch.rand(10)

    run_ranks(2, rank_main)
    assert torch.equal(torch.rand(4), expected)


def test_seed_repeats() -> None:
    def rank_main(rank: int) -> tuple[Tensor, Tensor]:
        with ops.use(mesh_groups({"dp": 2})):
            draws = []
            for _ in range(2):
                ops.manual_seed(11)
                draws.append(ops.dropout(torch.ones(64), 0.5, ("dp",)))
            return draws[0], draws[1]

    assert all(torch.equal(first, second) for first, second in run_ranks(2, rank_main))


def test_recomputation_draws_the_same_mask() -> None:
    def rank_main(rank: int) -> tuple[Tensor, Tensor] | None:
        with ops.use(mesh_groups({"dp": 2})):
            if rank == 1:
                return None  # torch's generator belongs to the process: only one rank may draw from it here
            random._root.generator = None  # as in a real process
            x = torch.ones(256, requires_grad=True)
            y = checkpoint(lambda t: ops.dropout(t, 0.5, ("dp",)) * t, x, use_reentrant=False)
            y.sum().backward()
            assert x.grad is not None
            return y.detach(), x.grad

    result = run_ranks(2, rank_main)[0]
    assert result is not None
    y, grad = result
    assert 0 < y.count_nonzero() < 256
    assert torch.equal(grad, 2 * y)

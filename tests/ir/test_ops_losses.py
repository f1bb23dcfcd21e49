"""Sharded cross entropy and embedding against torch's on one device, values and gradients."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.errors import ShardingError
from hgc.ir import ops


@dataclass(frozen=True)
class Case:
    """A cross entropy on a mesh of ``dp`` x ``tp`` ranks; ``padding`` columns follow the vocabulary."""

    dp: int
    tp: int
    rows: int
    classes: int
    padding: int
    weighted: bool
    smoothing: float
    reduction: str
    ignored: float
    dtype: torch.dtype = torch.float64


@st.composite
def cases(draw: st.DrawFn) -> Case:
    dp, tp = draw(st.sampled_from([(1, 2), (1, 3), (2, 1), (2, 2), (3, 1)]))
    classes = draw(st.integers(2, 9))
    return Case(
        dp,
        tp,
        rows=dp * draw(st.integers(1, 4)),
        classes=classes,
        padding=-classes % tp + tp * draw(st.integers(0, 2)),
        weighted=draw(st.booleans()),
        smoothing=draw(st.sampled_from([0.0, 0.1])),
        reduction=draw(st.sampled_from(["mean", "sum"])),
        ignored=draw(st.sampled_from([0.0, 0.5])),
    )


def tensors(case: Case) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(case.rows * 100 + case.classes)
    logits = 4 * torch.randn(case.rows, case.classes + case.padding, generator=generator, dtype=torch.float64)
    target = torch.randint(0, case.classes, (case.rows,), generator=generator)
    target[torch.rand(case.rows, generator=generator) < case.ignored] = -7
    weight = 0.5 + torch.rand(case.classes, generator=generator, dtype=torch.float64) if case.weighted else None
    return logits.to(case.dtype), target, weight


def single(case: Case) -> tuple[Tensor, Tensor]:
    logits, target, weight = tensors(case)
    logits = logits.double().requires_grad_()
    loss = F.cross_entropy(
        logits[:, : case.classes], target, weight, ignore_index=-7, reduction=case.reduction, label_smoothing=case.smoothing
    )
    (grad,) = torch.autograd.grad(loss, logits)
    return loss.detach(), grad


def distributed(case: Case) -> tuple[Tensor, Tensor]:
    logits, target, weight = tensors(case)

    def rank_main(rank: int) -> tuple[Tensor, Tensor]:
        with ops.use(mesh_groups({"dp": case.dp, "tp": case.tp})):
            mine = ops.shard(ops.shard(logits, 0, "dp"), 1, "tp").contiguous().requires_grad_()
            loss = ops.cross_entropy(
                mine, ops.shard(target, 0, "dp"), weight, case.reduction, -7, case.smoothing, "tp", ("dp",), vocab_size=case.classes
            )
            loss = ops.all_reduce(loss, "dp")
            loss.backward()
            assert mine.grad is not None
            return loss.detach(), ops.all_gather(ops.all_gather(mine.grad, 1, "tp"), 0, "dp")

    results = run_ranks(case.dp * case.tp, rank_main)
    assert all(torch.equal(loss, results[0][0]) or loss.isnan() for loss, _ in results)
    return results[0]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_cross_entropy(case: Case) -> None:
    torch.testing.assert_close(distributed(case), single(case), rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (1, 2), (2, 2)])
def test_half_precision_is_accumulated_in_float32(dp: int, tp: int) -> None:
    case = Case(dp, tp, 64, 64, 0, weighted=False, smoothing=0.1, reduction="mean", ignored=0.2, dtype=torch.bfloat16)
    loss, grad = distributed(case)
    expected, expected_grad = single(case)
    assert loss.dtype == grad.dtype == torch.bfloat16
    assert abs(loss.item() - expected.item()) < 2**-8 * expected.item()
    assert (grad.double() - expected_grad).abs().max() < 2**-7 * expected_grad.abs().max()


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_forbidden_classes(smoothing: float) -> None:
    """Models forbid classes with minus infinity, or the lowest number; here all classes of the second rank in some rows."""
    logits, target = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 1, 3, -100, 2, 7])
    logits[:2, 4:], logits[2, 4:6] = torch.finfo(torch.float64).min, torch.finfo(torch.float64).min
    if not smoothing:
        logits[:2, 4:] = -torch.inf
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole, target, label_smoothing=smoothing)
    expected.backward()

    def rank_main(rank: int) -> tuple[Tensor, Tensor]:
        with ops.use(mesh_groups({"tp": 2})):
            mine = ops.shard(logits, 1, "tp").clone().requires_grad_()
            loss = ops.cross_entropy(mine, target, label_smoothing=smoothing, vocab_axis="tp")
            loss.backward()
            assert mine.grad is not None
            return loss.detach(), ops.all_gather(mine.grad, 1, "tp")

    for found in run_ranks(2, rank_main):
        torch.testing.assert_close(found, (expected.detach(), whole.grad))


def test_no_reduction_keeps_rows() -> None:
    logits, target = torch.randn(4, 6), torch.tensor([0, 5, -100, 2])

    def rank_main(rank: int) -> Tensor:
        with ops.use(mesh_groups({"tp": 2})):
            return ops.cross_entropy(ops.shard(logits, 1, "tp"), target, reduction="none", vocab_axis="tp")

    for rows in run_ranks(2, rank_main):
        torch.testing.assert_close(rows, F.cross_entropy(logits, target, reduction="none"))


def test_class_probabilities_over_the_batch() -> None:
    logits, target = torch.randn(4, 6), torch.rand(4, 6).softmax(1)

    def rank_main(rank: int) -> Tensor:
        with ops.use(mesh_groups({"dp": 2})):
            return ops.all_reduce(ops.cross_entropy(ops.shard(logits, 0, "dp"), ops.shard(target, 0, "dp"), batch_axes=("dp",)), "dp")

    for loss in run_ranks(2, rank_main):
        torch.testing.assert_close(loss, F.cross_entropy(logits, target))


def test_class_probabilities_over_the_vocabulary_are_refused() -> None:
    def rank_main(rank: int) -> None:
        with ops.use(mesh_groups({"tp": 2})):
            ops.cross_entropy(torch.randn(4, 3), torch.rand(4, 6), vocab_axis="tp")

    with pytest.raises(ShardingError, match="class indices"):
        run_ranks(2, rank_main)


def test_single_device_self() -> None:
    logits, target, weight = torch.randn(5, 7, 3), torch.randint(0, 7, (5, 3)), torch.rand(7)
    expected = F.cross_entropy(logits, target, weight, label_smoothing=0.1, ignore_index=2)
    assert torch.equal(ops.cross_entropy(logits, target, weight, "mean", 2, 0.1, "tp", ("dp",)), expected)
    weight = torch.randn(7, 2)
    assert torch.equal(ops.vocab_embedding(weight, target, "tp"), F.embedding(target, weight))


@pytest.mark.parametrize("padding_idx", [-1, 0, 5])
def test_vocab_embedding(padding_idx: int) -> None:
    table, ids = torch.randn(8, 3, dtype=torch.float64), torch.randint(0, 8, (2, 5))
    ids[0, :2], ids[1, :2] = 0, 5
    upstream = torch.randn(2, 5, 3, dtype=torch.float64)

    def rank_main(rank: int) -> tuple[Tensor, Tensor]:
        with ops.use(mesh_groups({"tp": 4})):
            weight = ops.shard(table, 0, "tp").clone().requires_grad_()
            out = ops.all_reduce(ops.vocab_embedding(weight, ids, "tp", padding_idx), "tp")
            out.backward(upstream)
            assert weight.grad is not None
            return out.detach(), ops.all_gather(weight.grad, 0, "tp")

    whole = table.clone().requires_grad_()
    expected = F.embedding(ids, whole, padding_idx if padding_idx >= 0 else None)
    expected.backward(upstream)
    for out, grad in run_ranks(4, rank_main):
        torch.testing.assert_close((out, grad), (expected.detach(), whole.grad))

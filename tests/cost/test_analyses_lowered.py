"""Communication of lowered programs: predicted bytes are those that pass through the raw collectives when ranks run as threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hgc.backends.parity.case import without_dropout
from hgc.cost.symbolic import Communication, exact
from hgc.ir.input_sizes import input_sizes
from hgc.ir.ops import collectives, groups
from tests.cost.small import FAMILIES, costs, lowered, lowered_costs, traced
from tests.distributed.lowered import run_lowered

_RAW = {
    "all_reduce": "all_reduce",
    "start_all_reduce": "all_reduce",
    "all_gather_flat": "all_gather",
    "reduce_scatter_flat": "reduce_scatter",
    "all_to_all_flat": "all_to_all",
    "start_shift": "send",
}


@contextmanager
def counting(counted: Counter[tuple[str, str]], calls: Counter[tuple[str, str]]) -> Iterator[None]:
    """Bytes and calls by collective and axis, over all ranks; the larger of what goes in and what comes out."""
    axes: dict[str, str] = {}
    lock = threading.Lock()

    def watched(name: str, real: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(x: Tensor, *args: Any) -> Tensor:
            result = real(x, *args)
            with lock:
                axes.update({group.name: axis for axis, group in groups._table.groups.items()})
                key = (_RAW[name], axes[args[-1]])
                counted[key] += max(x.nbytes, result.nbytes)
                calls[key] += 1
            return result

        return call

    with mock.patch.multiple(collectives.raw, **{name: watched(name, getattr(collectives.raw, name)) for name in _RAW}):
        yield


def _by_axis(found: tuple[Communication, ...], sizes: Any) -> tuple[dict[tuple[str, str], int], dict[tuple[str, str], int]]:
    bytes_, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for each in found:
        bytes_[each.collective, each.axis] += exact(each.payload_bytes, sizes)
        calls[each.collective, each.axis] += each.calls
    return dict(bytes_), dict(calls)


@pytest.mark.parametrize(
    ("family", "plans"),
    [
        ("llama", ("dp2 tp2", "cp2 sp2")),
        ("gpt2", ("tp4 no-vocab-parallel",)),
        ("bert", ("tp2 no-sequence-parallel", "cp4")),
        ("t5", ("dp2 tp2",)),
        ("vit", ("dp2 tp2",)),
        ("cnn", ("dp4",)),
        ("mixtral", ("dp2 tp2",)),
    ],
)
def test_bytes_of_each_collective_are_those_of_a_run(family: str, plans: tuple[str, ...]) -> None:
    model, program = traced(family)
    state = {name: t.detach() for name, t in model.state_dict().items()}
    for plan in plans:
        found = lowered_costs(family, plan)
        assert not found.notes
        distributed, _ = lowered(family, plan)
        ranks = torch.Size(distributed.mesh.values()).numel()
        for b, s in ((4, 14), (8, 22)) if family == "t5" else ((4, 16), (8, 24)):
            batch = FAMILIES[family][1](b, s)
            counted, calls = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
            with without_dropout(), counting(counted, calls):
                run_lowered(distributed, batch, state)
            expected = _by_axis(found.communication, input_sizes(program, batch))
            assert expected[0] == {key: count // ranks for key, count in counted.items()}
            assert expected[1] == {key: count // ranks for key, count in calls.items()}


def test_a_rank_does_its_share() -> None:
    """Data and tensor parallel ranks divide the products evenly; with sequence parallelism also what is saved between them."""
    whole = costs("llama")
    part = lowered_costs("llama", "dp2 tp2")
    assert part.forward_flops == whole.forward_flops / 4
    assert part.backward_flops == whole.backward_flops / 4
    b, s = whole.symbols
    layer = part.bodies["LlamaDecoderLayer"]
    gathered = 2 * (b / 2) * s * 256  # the inputs of the two regions, whole along the sequence
    assert layer.saved_bytes == (whole.bodies["LlamaDecoderLayer"].saved_bytes - 2 * b * s * 256) / 4 + gathered


def test_what_a_ring_sends() -> None:
    total = Communication("all_reduce", "dp", 4, 1024)  # type: ignore[arg-type]
    gathered = Communication("all_gather", "dp", 4, 1024)  # type: ignore[arg-type]
    assert (total.sent_bytes, gathered.sent_bytes) == (1536, 768)

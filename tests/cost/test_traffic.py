"""What the runtime sends for gradients and ZeRO, against the bytes of trainers whose ranks are threads."""

from __future__ import annotations

import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from hgc import runtime as rt
from hgc.backends import torchrun
from hgc.backends.parity.threads import run_ranks
from hgc.cluster import Cluster
from hgc.cost.places import group_place
from hgc.cost.symbolic import exact
from hgc.cost.traffic import BACKWARD, FORWARD, Traffic, optimizer_bytes, optimizer_s, traffic, traffic_s
from hgc.errors import HgcError
from hgc.ir.program import Program
from hgc.plan import Plan, Precision
from hgc.strategy import Strategy
from tests.cost.small import FAMILIES, lowered, state_of, traced

_RENAMED = {"all_gather_single": "all_gather", "reduce_scatter_single": "reduce_scatter"}  # the names that FSDP2 calls, from torch 2.13 on
_BEFORE = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
_CALLS = {"all_reduce": "all_reduce", **(_RENAMED if hasattr(dist, "all_gather_single") else _BEFORE)}


@contextmanager
def counting(counted: Counter[str]) -> Iterator[None]:
    """Bytes of each kind of collective that the runtime starts, over all ranks; the larger of what goes in and what comes out."""
    lock = threading.Lock()

    def watched(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            with lock:
                counted[_CALLS[name]] += max(t.nbytes for t in tensors)
            return real(*args, **kwargs)

        return call

    with mock.patch.multiple(dist, **{name: watched(name, getattr(dist, name)) for name in _CALLS}):
        yield


def sent(family: str, program: Program, plan: Plan, folder: Path, **options: Any) -> dict[str, int]:
    """Bytes of one rank in its second step; the first one of FSDP gathers and checks other things too."""
    torchrun.write(folder, program, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = torchrun.load_model(folder)
    state = {name: tensor.detach() for name, tensor in state_of(traced(family)[0]).items()}
    batch = FAMILIES[family][1](8, 16)
    counted: Counter[str] = Counter()
    ready = threading.Barrier(plan.devices)

    def rank_main(rank: int) -> None:
        trainer = rt.Trainer(model, info, state=state, device="cpu", **options)
        trainer.step(batch)
        ready.wait()
        if rank == 0:
            counted.clear()
        ready.wait()
        trainer.step(batch)

    with counting(counted):
        run_ranks(plan.devices, rank_main)
    return {kind: total // plan.devices for kind, total in counted.items()}


def total(found: tuple[Traffic, ...], micro_batches: int) -> dict[str, int]:
    bytes_: Counter[str] = Counter()
    for each in found:
        often = micro_batches if each.when in (FORWARD, BACKWARD) else 1
        bytes_[each.collective] += exact(each.payload_bytes, {}) * often
    return dict(bytes_)


BFLOAT16 = Precision(compute="bfloat16", parameters="float32")
MASTER = Precision(parameters="bfloat16", master="float32", gradients="float32")


@pytest.mark.parametrize(
    ("family", "text", "micro_batches", "precision"),
    [
        ("llama", "dp2", 2, Precision()),
        ("cnn", "dp4", 1, Precision()),
        ("gpt2", "dp2", 1, Precision(gradients="bfloat16")),
        ("llama", "dp2 zero1", 2, Precision()),
        ("llama", "dp2 zero2", 2, Precision()),
        ("llama", "dp2 zero3", 2, Precision()),
        ("gpt2", "dp4 zero3", 1, Precision()),
        ("llama", "dp2 zero3", 1, BFLOAT16),
    ],
)
def test_bytes_are_those_of_a_trainer(family: str, text: str, micro_batches: int, precision: Precision, tmp_path: Path) -> None:
    program, plan = lowered(family, text)
    counted = sent(family, program, plan, tmp_path, micro_batches=micro_batches, precision=precision)
    assert counted == total(traffic(program, plan.strategy, precision), micro_batches)


def test_what_comes_when() -> None:
    program, plan = lowered("llama", "dp2 zero3")
    found = [(each.name, each.collective, each.when, each.unit) for each in traffic(program, plan.strategy)]
    assert found[0] == ("parameters", "all_gather", "forward", "")
    assert found[1] == ("parameters", "all_gather", "forward", "model.layers.0")
    assert found[4:6] == [
        ("parameters", "all_gather", "backward", "model.layers.2"),
        ("gradients", "reduce_scatter", "backward", "model.layers.2"),
    ]
    assert found[-1] == ("gradients", "reduce_scatter", "backward", "")
    once = [each.when for each in traffic(program, Strategy(dp=2, zero=1))]
    assert once == ["first forward"] * 4 + ["last backward"] * 4


def test_seconds_of_a_step() -> None:
    cluster = Cluster.preset("h100")
    program, plan = lowered("llama", "dp2 zero3")
    found = traffic(program, plan.strategy)
    place = group_place(cluster, plan.mesh, ("dp",))
    one, four = (traffic_s(found, lambda _: place, count) for count in (1, 4))
    assert four == pytest.approx(4 * one)
    assert one == pytest.approx(sum(each.seconds(place) for each in found))


def test_bytes_of_an_optimizer_step() -> None:
    program, plan = lowered("llama", "dp2")
    numbers = sum(int(entry.value.numel) for entry in program.state.values() if entry.kind == "parameter")
    assert exact(optimizer_bytes(program, plan.strategy, fused=True), {}) == 7 * 4 * numbers
    assert exact(optimizer_bytes(program, plan.strategy), {}) == 20 * 4 * numbers
    vectors = sum(int(entry.value.numel) for entry in program.state.values() if entry.kind == "parameter" and len(entry.value.shape) < 2)
    wide, copied = 10 * 4, 10 * 4 + 6  # vectors stay in float32, so that they need no copy
    found = exact(optimizer_bytes(program, plan.strategy, MASTER, fused=True, clipping=True), {})
    assert found == copied * (numbers - vectors) + wide * vectors
    sharded = optimizer_bytes(program, Strategy(dp=2, zero=1), fused=True)
    assert exact(sharded, {}) == 7 * 4 * numbers // 2
    assert optimizer_s(1e9, Cluster.preset("h100").nodes[0].device) == pytest.approx(1e9 / 3e12, rel=0.3)
    with pytest.raises(HgcError, match="the optimizer 'lion' is not known"):
        optimizer_bytes(program, plan.strategy, optimizer="lion")

"""No step of a trainer waits for its device: nothing reads a tensor's values, except where it is said here and why."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hgc import _torch_compat as compat
from hgc import compiler
from hgc import runtime as rt
from hgc.backends import torchrun
from hgc.backends.parity.threads import run_ranks
from hgc.runtime.batches import local_batch, to_device
from hgc.runtime.precision import read_precision
from hgc.runtime.state import allocate, entries_of
from hgc.tools.bench.overhead_models import Size, global_batch, llama
from tests.distributed.processes import run_processes
from tests.runtime.programs import Model, batch, plan, reference, whole_state

SIZE = Size(hidden=32, layers=2, heads=4, vocabulary=64, rows=4, length=16)
EMITTED = ("cp2", "sp2", "pp2 micro2", "dp2 recompute")
READING = frozenset(
    {"aten::_local_scalar_dense", "aten::nonzero", "aten::bincount", "aten::masked_select", "aten::_unique2", "aten::equal"}
)
"""Operators whose result, or whose size, the host has to know before it can go on."""
KNOWN = frozenset(
    {
        "random.py:next_seed",  # drawn by the CPU's generator, whatever the device
        "executor_exchange.py:_segments",  # indices on the CPU, once for each shape of a batch
    }
)

pytestmark = pytest.mark.distributed


@contextmanager
def watched() -> Iterator[Counter[str]]:
    """Counts reads of values by the innermost function of hgc that leads to them, FSDP2's own left out."""
    found: Counter[str] = Counter()

    def note() -> None:
        frames = traceback.extract_stack()
        if any("/fsdp/" in frame.filename for frame in frames):
            return  # it reads sizes and states that it keeps on the host
        own = [frame for frame in frames if f"{Path(compat.__file__).parent}/" in frame.filename and "_torch_compat" not in frame.filename]
        found[f"{Path(own[-1].filename).name}:{own[-1].name}" if own else "elsewhere"] += 1

    def report(operator: Any, *_: Any) -> None:
        if operator.name().partition(".")[0] in READING:
            note()

    names = ("tolist", "numpy")  # these read memory without an operator
    before = {name: getattr(Tensor, name) for name in names}

    def reading(name: str) -> Any:
        def read(self: Tensor, *args: Any, **kwargs: Any) -> Any:
            note()
            return before[name](self, *args, **kwargs)

        return read

    for name in names:
        setattr(Tensor, name, reading(name))
    try:
        with compat.watching_calls(report):
            yield found
    finally:
        for name in names:
            setattr(Tensor, name, before[name])


def _by_hand(dp: int, tp: int, zero: int) -> dict[str, int]:
    """Of a step of the program whose head has a parameter that nobody uses, and of clipping."""
    trainer = rt.Trainer(Model, plan(dp, tp, zero), state=whole_state(reference(torch.float32)), device="cpu")
    trainer.step(batch(0))
    with watched() as found:
        trainer.step(batch(1))
        trainer.clip_grad_norm(1.0)
    return dict(found)


def _emitted(folder: Path) -> dict[str, int]:
    model, found_plan = torchrun.load_model(folder)
    trainer = rt.make_trainer(model, found_plan, state=llama(SIZE).state_dict(), device="cpu")
    trainer.step(global_batch(SIZE, 0))
    with watched() as found:
        trainer.step(global_batch(SIZE, 1))
        trainer.clip_grad_norm(1.0)
    return dict(found)


def _all(rank: int, folder: str) -> dict[str, dict[str, int]]:
    hand = {f"by hand {sizes}": _by_hand(*sizes) for sizes in ((2, 1, 0), (1, 2, 0), (2, 1, 2), (2, 1, 3))}
    return hand | {strategy: _emitted(Path(folder, strategy)) for strategy in EMITTED}


def test_no_step_reads_values(tmp_path: Path) -> None:
    for strategy in EMITTED:
        compiler.compile(llama(SIZE), global_batch(SIZE, 0), plan=strategy).save(tmp_path / strategy)
    for found in run_processes(2, _all, str(tmp_path)):
        # whether any rank has a gradient that this one lacks decides if `grad` stays None: read once a step, after the last backward
        assert found.pop("by hand (2, 1, 0)") == {"reducer.py:_restore_absent": 1}
        assert {name: {place: n for place, n in places.items() if place not in KNOWN} for name, places in found.items()} == {
            name: {} for name in found
        }


def test_reads_are_seen() -> None:
    with watched() as found:
        x = torch.ones(3, requires_grad=True)
        float(x.detach().sum())
        x.tolist()
        x.nonzero()
        (x * 2).sum().backward()  # type: ignore[no-untyped-call]
    assert found == {"elsewhere": 3}


def test_batches_stay_where_they_are_on_a_cpu() -> None:
    x = torch.ones(3)
    assert to_device(x, torch.device("cpu")) is x


def test_batches_go_to_a_gpu_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only from there does a copy run beside computation. No GPU is needed to see what is asked for."""
    asked: list[Any] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: asked.append("pinned") or self)
    monkeypatch.setattr(Tensor, "to", lambda self, *args, **kwargs: asked.append((args, kwargs)) or self)
    device = torch.device("cuda", 0)
    to_device(torch.ones(3), device)
    assert asked == ["pinned", ((device,), {"non_blocking": True})]


def _step_without_data(folder: Path) -> None:
    """A rank's forward and backward on fake tensors that are not on the CPU: what mixes in a CPU tensor, or reads a value, raises."""
    made, found_plan = torchrun.load_model(folder)
    mesh = rt.start(found_plan, torch.device("cpu"))
    part = local_batch(global_batch(SIZE, 0), found_plan, mesh)
    mesh.device = torch.device("meta")
    model = made()
    model.tie(found_plan.tied)
    with compat.symbolic_mode(), torch.autograd.set_multithreading_enabled(False):
        entries = entries_of(model, found_plan, mesh)
        allocate(entries, mesh, read_precision(found_plan.precision))
        inputs = {name: torch.zeros(tensor.shape, dtype=tensor.dtype, device=mesh.device) for name, tensor in part.items()}
        with mesh.active():
            model(**inputs).backward()
        gradients = [entry.module_tensor().grad for entry in entries if entry.is_parameter]
    assert {None if gradient is None else gradient.device.type for gradient in gradients} == {"meta"}


@pytest.mark.parametrize("strategy", ["dp2", "tp2", "cp2", "sp2"])
def test_nothing_of_a_step_assumes_a_cpu(strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta, because torch refuses to slice fake CUDA tensors where it is built without CUDA."""
    compiler.compile(llama(SIZE), global_batch(SIZE, 0), plan=strategy).save(tmp_path / "program")
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)  # it knows no meta
    run_ranks(2, lambda rank: _step_without_data(tmp_path / "program"))


def test_a_cpu_tensor_in_a_step_raises() -> None:
    with compat.symbolic_mode():
        x = torch.ones(3, device="meta")
        with pytest.raises(RuntimeError, match="device"):
            x + torch.ones(3)
        with pytest.raises(Exception, match="_local_scalar_dense"):
            x.tolist()

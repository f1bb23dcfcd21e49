"""What a pipeline's trainer offers beside steps: state, gradients, norms, checkpoints, and refusals."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hgc
from hgc import runtime as rt
from hgc.backends import torchrun
from hgc.backends.parity.case import without_dropout
from hgc.backends.parity.threads import run_ranks
from hgc.errors import ArtifactError, PlanError, ShardingError
from hgc.ir.ops.random import get_state
from hgc.plan import Plan
from hgc.strategy import Strategy
from tests.distributed.pipelines import MakePlan, emitted, even, placed, subject, unlike

PLANS: dict[str, MakePlan] = {
    "pp2": even(2),
    "zbv": even(2, schedule="zbv", virtual=2),
    "tp2 -> dp2 zero3": unlike("tp2", "dp2 zero3"),
    "pp2 x dp2": even(2, "dp2"),
    "unlike on the same ranks": placed((2, 0, "dp2 zero3"), (1, 2, "tp2"), (2, 0, "tp2")),
}


@pytest.fixture(autouse=True)
def _no_dropout() -> Iterator[None]:
    with without_dropout():
        yield


@cache
def program(name: str, folder: Path) -> tuple[Any, Any, int]:
    traced = subject("gpt2").program
    if name in PLANS:
        plan = PLANS[name](traced)
        return *emitted(traced, plan, folder / name.replace(" ", "-")), plan.devices
    plan = Plan(Strategy.parse(name))
    target = folder / name.replace(" ", "-")
    with torchrun.staged(target) as staging:
        torchrun.write(staging, hgc.distribute(traced, plan), plan)
    return *torchrun.load_model(target), plan.devices


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def trainer_of(model: Any, plan: Any, lr: float = 0.01) -> tuple[Any, torch.optim.Optimizer]:
    case = subject("gpt2").cases[torch.float64]
    trainer = rt.make_trainer(model, plan, state=case.state, dtype=torch.float64, device="cpu")
    return trainer, torch.optim.AdamW(trainer.parameters(), lr=lr)


def batch(step: int) -> dict[str, Tensor]:
    return {name: tensor.roll(step, 0) for name, tensor in subject("gpt2").cases[torch.float64].batches[0].items()}


def train(trainer: Any, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        losses.append(float(trainer.step(batch(step))))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def on_ranks(name: str, folder: Path, do: Any) -> list[Any]:
    model, plan, devices = program(name, folder)
    return run_ranks(devices, lambda rank: do(*trainer_of(model, plan)))


@pytest.mark.parametrize(
    ("before", "after"), [("pp2", "dp2"), ("dp2", "zbv"), ("zbv", "tp2 -> dp2 zero3"), ("tp2 -> dp2 zero3", "unlike on the same ranks")]
)
def test_training_continues_under_another_plan(before: str, after: str, folder: Path, tmp_path: Path) -> None:
    """The optimizer's state and the tied table's copies too; names are the model's."""

    def save(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
        train(trainer, optimizer, range(2))
        trainer.save(tmp_path / "c", optimizer, 2)

    def resume(trainer: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        optimizer.param_groups[0]["lr"] = 7.0  # the checkpoint's counts
        return train(trainer, optimizer, range(trainer.load(tmp_path / "c", optimizer), 5))

    expected = on_ranks("dp1", folder, lambda trainer, optimizer: train(trainer, optimizer, range(5)))[0]
    on_ranks(before, folder, save)
    for losses in on_ranks(after, folder, resume):
        assert losses == pytest.approx(expected[2:], rel=1e-9)


def test_a_checkpoint_of_another_model_is_refused(folder: Path, tmp_path: Path) -> None:
    """Also where the difference is in a stage of another rank."""
    on_ranks("pp2", folder, lambda trainer, optimizer: trainer.save(tmp_path / "c", optimizer, 0))
    model, plan, _ = program("pp2", folder)
    cut_short = (model[0], type(model[1]().__class__.__name__, (rt.Model,), {"__init__": lambda self: _without_head(self, model[1])}))

    def load(rank: int) -> None:
        rt.make_trainer(cut_short, plan, state=subject("gpt2").cases[torch.float64].state, device="cpu").load(tmp_path / "c")

    with pytest.raises(ArtifactError, match="belongs to another model"):
        run_ranks(2, load)


def _without_head(made: Any, original: Any) -> None:
    rt.Model.__init__(made)
    whole = original()
    made.layers = whole.layers if hasattr(whole, "layers") else next(iter(whole.children()))


@pytest.mark.parametrize("name", PLANS)
def test_norm_gradients_and_state_are_the_whole_models(name: str, folder: Path) -> None:
    def look(trainer: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
        loss = trainer.loss(batch(0))
        trainer.step(batch(0))
        gradients = trainer.full_gradients()
        norm = trainer.clip_grad_norm(0.1)
        clipped = trainer.clip_grad_norm(1e9)
        optimizer.step()
        return loss, gradients, norm, clipped, trainer.full_state_dict()

    one = on_ranks("dp1", folder, look)[0]
    for found in on_ranks(name, folder, look):
        for index in (0, 2, 3):
            assert found[index].item() == pytest.approx(one[index].item(), rel=1e-9)
        for index in (1, 4):
            assert found[index].keys() == one[index].keys()
            for key, tensor in one[index].items():
                torch.testing.assert_close(found[index][key], tensor, rtol=1e-9, atol=1e-12)


def test_steps_without_zero_grad_add_up(folder: Path) -> None:
    """The tied table's sum over stages is not summed again."""

    def look(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
        trainer.step(batch(0))
        trainer.step(batch(1))
        return trainer.full_gradients()

    one = on_ranks("dp1", folder, look)[0]
    for found in on_ranks("pp2", folder, look):
        for key, tensor in one.items():
            torch.testing.assert_close(found[key], tensor, rtol=1e-9, atol=1e-12)


def test_state_is_loaded_into_all_copies(folder: Path) -> None:
    state = {name: tensor + 1 for name, tensor in subject("gpt2").cases[torch.float64].state.items()}

    def load(trainer: Any, optimizer: torch.optim.Optimizer) -> Any:
        trainer.load_state_dict(state)
        tables = [parameter for name, parameter in trainer.named_parameters() if name.partition("@")[0] == "transformer.wte.weight"]
        return trainer.full_state_dict(), tables

    for found, tables in on_ranks("zbv", folder, load):
        assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
        assert all(torch.equal(table, state["transformer.wte.weight"]) for table in tables)


def test_export_is_the_users_state(folder: Path, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    on_ranks("pp2", folder, lambda trainer, optimizer: trainer.export(tmp_path / "w.safetensors"))
    found = safetensors.load_file(tmp_path / "w.safetensors")
    state = subject("gpt2").cases[torch.float64].state
    assert found.keys() == state.keys() - {"lm_head.weight"}
    assert all(torch.allclose(tensor.double(), state[name]) for name, tensor in found.items())


def test_random_numbers_differ_between_stages_and_stay_in_step(folder: Path) -> None:
    """Every stage and micro-batch has its own; a step takes one draw on every rank, so a checkpoint's state fits all of them."""
    model, plan, devices = program("pp2 x dp2", folder)

    def look(rank: int) -> tuple[list[Tensor], Tensor]:
        trainer, _ = trainer_of(model, plan)
        seen: list[Tensor] = []
        for stage in trainer._stages.values():
            forward = stage.model.forward

            def watched(*args: Tensor, forward: Any = forward, **kwargs: Tensor) -> Any:
                seen.append(get_state())
                return forward(*args, **kwargs)

            stage.model.forward = watched
        trainer.step(batch(0))
        return seen, get_state()

    found = run_ranks(devices, look)
    drawn = [tuple(tuple(state.tolist()) for state in seen) for seen, _ in found]
    assert drawn[0] == drawn[1]
    assert drawn[2] == drawn[3]
    assert len({state for seen in drawn for state in seen}) == 4
    assert all(torch.equal(state, found[0][1]) for _, state in found)


# -- refusals -------------------------------------------------------------------------------------------------------------------------


def test_a_schedule_that_would_hang_is_refused_before_anything_is_sent(folder: Path) -> None:
    model, plan, _ = program("pp2", folder)
    swapped = plan.schedule.replace("1F0", "1X0").replace("1RECV_F0", "1F0").replace("1X0", "1RECV_F0")
    assert swapped != plan.schedule

    def start(rank: int) -> None:
        trainer_of(model, replace(plan, schedule=swapped))

    with pytest.raises(PlanError, match="rank 1 is stuck at 1F0: 1RECV_F0 does not stand before it"):
        run_ranks(2, start)


def test_other_batches_are_refused(folder: Path) -> None:
    model, plan, _ = program("pp2", folder)

    def local(trainer: Any, optimizer: torch.optim.Optimizer) -> None:
        trainer.step(rt.LocalBatch(batch(0)))

    with pytest.raises(rt.BatchError, match="give the global batch"):
        on_ranks("pp2", folder, local)
    with pytest.raises(rt.BatchError, match="3 rows of input 'input_ids' do not divide into 2 micro-batches"):
        on_ranks("pp2", folder, lambda trainer, _: trainer.step({name: tensor[:3] for name, tensor in batch(0).items()}))
    with pytest.raises(PlanError, match="schedule is for 2; compile it with micro_batches=3"):
        run_ranks(2, lambda rank: rt.make_trainer(model, plan, micro_batches=3, device="cpu"))


def test_a_batch_that_micro_batches_do_not_divide_is_refused_when_compiling() -> None:
    traced = subject("gpt2").program
    with pytest.raises(ShardingError, match="dp=2 times 3 micro-batches does not divide"):
        hgc.compiler.distribute_stages(traced, even(2, "dp2", micro_batches=3)(traced))


def test_a_schedule_of_another_plan_is_refused(folder: Path) -> None:
    model, plan, _ = program("pp2", folder)
    for changed, sentence in (
        (replace(plan, micro_batches=4), "the schedule is for 2 stages and 2 micro-batches, the plan for 2 and 4"),
        (
            replace(plan, schedule=plan.schedule.replace("rank 0", "rank 9").replace("rank 1", "rank 0").replace("rank 9", "rank 1")),
            "stage 0",
        ),
    ):
        with pytest.raises(PlanError, match=sentence):
            run_ranks(2, lambda rank, changed=changed: rt.make_trainer(model, changed, device="cpu"))


def test_micro_batches_smaller_than_the_model_takes_are_refused_when_compiling() -> None:
    traced = subject("gpt2").program.copy()
    (symbol,) = (symbol for symbol, found in traced.symbols.items() if found.meaning == "batch")
    traced.symbols[symbol] = replace(traced.symbols[symbol], low=2)
    with pytest.raises(ShardingError, match="1 in each of 4 micro-batches, but the model was traced for 2 or more"):
        hgc.compiler.distribute_stages(traced, even(2, micro_batches=4)(traced))

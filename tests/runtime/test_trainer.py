"""The trainer against the model on one device, over several steps, with ranks as threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from hgc import runtime as rt
from hgc.backends.parity.threads import run_ranks
from hgc.errors import ArtifactError, PlanError
from hgc.ir import ops
from tests.runtime.programs import Model, batch, plan, reference, whole_state

PLANS = [
    (1, 1, 0),
    (2, 1, 0),
    (1, 2, 0),
    (2, 2, 0),
    (4, 1, 0),
    (2, 1, 3),
    (2, 2, 3),
    (3, 1, 3),
    (1, 2, 3),
    (2, 2, 1),
    (3, 1, 1),
    (2, 2, 2),
    (4, 1, 2),
]
ROWS = 12
STATE = whole_state(reference())
Result = TypeVar("Result")


def train_reference(steps: int, clip: float) -> list[tuple[Tensor, dict[str, Tensor | None], Tensor]]:
    model = reference()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    history = []
    for step in range(steps):
        loss = model(**batch(step, ROWS))
        loss.backward()
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        history.append((loss.detach(), gradients, norm))
    return history


@pytest.mark.parametrize(("dp", "tp", "zero"), PLANS)
def test_steps_equal_one_device(dp: int, tp: int, zero: int) -> None:
    def rank_main(rank: int) -> list[tuple[Tensor, dict[str, Tensor | None], Tensor]]:
        trainer = rt.Trainer(Model, plan(dp, tp, zero), state=STATE, device="cpu", dtype=torch.float64)
        optimizer = torch.optim.AdamW(trainer.parameters(), lr=0.1)
        history = []
        for step in range(4):
            loss = trainer.step(batch(step, ROWS))
            gradients = trainer.full_gradients()
            norm = trainer.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
            history.append((loss, gradients, norm))
        return history

    expected = train_reference(4, 0.5)
    for history in run_ranks(dp * tp, rank_main):
        for (loss, gradients, norm), (want_loss, want_gradients, want_norm) in zip(history, expected, strict=True):
            torch.testing.assert_close((loss, norm), (want_loss, want_norm), rtol=1e-10, atol=1e-12)
            assert gradients.keys() == want_gradients.keys()
            for name, want in want_gradients.items():
                if want is None:
                    assert gradients[name] is None, name
                else:
                    torch.testing.assert_close(gradients[name], want, rtol=1e-9, atol=1e-12, msg=name)


def on_ranks(chosen: tuple[int, int, int], use: Callable[[rt.Trainer], Result], **options: object) -> list[Result]:
    given = {"state": STATE, "device": "cpu", "dtype": torch.float64, **options}
    return run_ranks(chosen[0] * chosen[1], lambda rank: use(rt.Trainer(Model, plan(*chosen), **given)))  # type: ignore[arg-type]


@pytest.mark.parametrize("chosen", [(1, 1, 0), (2, 2, 0), (2, 2, 1), (2, 1, 2), (2, 2, 3)])
def test_micro_batches_give_the_mean(chosen: tuple[int, int, int]) -> None:
    def use(trainer: rt.Trainer) -> tuple[Tensor, dict[str, Tensor | None], Tensor]:
        return trainer.step(batch(0, ROWS)), trainer.full_gradients(), trainer.loss(batch(0, ROWS))

    ((loss, gradients, evaluated),) = on_ranks((1, 1, 0), use)
    for got, got_gradients, got_evaluated in on_ranks(chosen, use, micro_batches=3):
        torch.testing.assert_close((got, got_evaluated), (loss, evaluated))
        for name, gradient in gradients.items():
            torch.testing.assert_close(got_gradients[name], gradient, msg=name) if gradient is not None else None


@pytest.mark.parametrize("chosen", [(2, 2, 0), (2, 1, 1), (2, 1, 2), (2, 2, 3)])
def test_gradients_add_up_until_they_are_cleared(chosen: tuple[int, int, int]) -> None:
    def use(trainer: rt.Trainer) -> tuple[dict[str, Tensor | None], dict[str, Tensor | None]]:
        trainer.step(batch(0, ROWS))
        once = trainer.full_gradients()
        trainer.step(batch(0, ROWS))
        return once, trainer.full_gradients()

    for once, twice in on_ranks(chosen, use):
        for name, gradient in once.items():
            if gradient is not None:
                torch.testing.assert_close(twice[name], 2 * gradient, msg=name)


@pytest.mark.parametrize("chosen", [(1, 1, 0), (1, 2, 0), (2, 2, 3), (3, 1, 3)])
def test_whole_state_goes_out_and_in(chosen: tuple[int, int, int]) -> None:
    expected = reference().state_dict()

    def use(trainer: rt.Trainer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        before = trainer.state_dict()
        trainer.load_state_dict({name: tensor + 1 for name, tensor in before.items()})
        return before, trainer.full_state_dict()

    for before, after in on_ranks(chosen, use):
        assert before.keys() == expected.keys()
        for name, tensor in expected.items():
            assert torch.equal(before[name], tensor), name
            assert torch.equal(after[name], tensor + 1), name


def test_initial_values_do_not_depend_on_the_plan() -> None:
    def use(trainer: rt.Trainer) -> dict[str, Tensor]:
        return trainer.state_dict()

    constants = {"positions": STATE["positions"]}
    (expected,) = on_ranks((1, 1, 0), use, state=constants, seed=5)
    assert 0.01 < expected["layers.0.qkv.weight"].std() < 0.03
    assert expected["scale"] == 1
    assert bool((expected["layers.1.norm.weight"] == 1).all())
    for state in on_ranks((2, 2, 3), use, state=constants, seed=5):
        assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("chosen", [(1, 1, 0), (2, 2, 0), (2, 1, 3)])
def test_mixed_precision_keeps_parameters_and_gradients_in_float32(chosen: tuple[int, int, int]) -> None:
    def use(trainer: rt.Trainer) -> tuple[Tensor, set[torch.dtype], dict[str, Tensor | None]]:
        loss = trainer.step(batch(0, ROWS))
        dtypes = {p.dtype for p in trainer.parameters()} | {p.grad.dtype for p in trainer.parameters() if p.grad is not None}
        return loss, dtypes, trainer.full_gradients()

    loss, want, _ = train_reference(1, 1e9)[0]
    for got, dtypes, gradients in on_ranks(chosen, use, dtype=None, precision=rt.Precision(compute="bfloat16", parameters="float32")):
        assert dtypes == {torch.float32}
        assert 0 < abs(got.item() - loss.item()) < 0.02
        largest = max(float(g.abs().max()) for g in want.values() if g is not None)
        for name, gradient in want.items():
            if gradient is not None:
                found = gradients[name]
                assert found is not None
                assert (found.double() - gradient).abs().max() < 0.03 * largest, name


def test_shares_under_fsdp_are_plain_and_small() -> None:
    def use(trainer: rt.Trainer) -> tuple[int, int, list[type]]:
        layer = [p.numel() for name, p in trainer.named_parameters() if name.startswith("layers.")]
        return sum(layer), len(layer), [type(p.data) for p in trainer.parameters()]

    whole = sum(p.numel() for name, p in reference().named_parameters() if name.startswith("layers."))
    shares = on_ranks((4, 1, 3), use)
    assert sum(size for size, _, _ in shares) == whole
    assert all(size == whole // 4 for size, _, _ in shares)
    assert {kind for _, _, kinds in shares for kind in kinds} == {Tensor}


@pytest.mark.parametrize(
    ("state", "sentence"),
    [
        ({"positions": torch.ones(32, 7)}, "'positions' has shape"),
        ({}, "values of buffer 'positions' are missing"),
    ],
)
def test_state_that_does_not_fit_is_refused(state: dict[str, Tensor], sentence: str) -> None:
    with pytest.raises(ArtifactError, match=sentence):
        on_ranks((1, 1, 0), lambda trainer: None, state=state)


def test_state_dict_that_does_not_fit_is_refused() -> None:
    state = {name: tensor for name, tensor in STATE.items() if name != "scale"}
    with pytest.raises(ArtifactError, match="lacks 'scale'"):
        on_ranks((1, 1, 0), lambda trainer: trainer.load_state_dict(state))
    with pytest.raises(ArtifactError, match="has 'other', which the program does not know"):
        on_ranks((1, 1, 0), lambda trainer: trainer.load_state_dict({**STATE, "other": torch.ones(1)}))


def test_wrong_number_of_processes_is_refused() -> None:
    with pytest.raises(PlanError, match=r"needs 4 processes \(dp=2 x tp=2\) but this job has 2"):
        run_ranks(2, lambda rank: rt.Trainer(Model, plan(2, 2), device="cpu"))


def test_weights_are_current_after_a_loss_without_backward() -> None:
    """FSDP2 keeps its root unit gathered after a forward; an optimizer step in between must not be missed."""

    def use(trainer: rt.Trainer) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        optimizer = torch.optim.SGD(trainer.parameters(), lr=1.0)
        trainer.step(batch(0, ROWS))
        before = trainer.loss(batch(1, ROWS))
        optimizer.step()
        return before, trainer.loss(batch(1, ROWS)), trainer.state_dict()

    ((before, after, state),) = on_ranks((1, 1, 0), use)
    for found in on_ranks((2, 1, 3), use):
        torch.testing.assert_close(found, (before, after, state))


class _Line(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("slope", (3, 5))
        self.parameter("offset", (7,))

    def forward(self, x: Tensor) -> Tensor:
        y = x[:, 0] * self.slope.sum() + self.offset.pow(2).sum()
        return ops.all_reduce(ops.all_reduce(ops.mean(y, [0], batch_axes=("dp", "sp")), "dp"), "sp")


class _Lines(rt.Model):
    def __init__(self) -> None:
        super().__init__()
        self.lines = rt.blocks("lines.{}", [_Line])

    def forward(self, x: Tensor) -> Tensor:
        for line in self.lines:
            x = line(x)
        return x


@pytest.mark.parametrize("zero", [0, 3])
def test_several_data_axes(zero: int) -> None:
    """Rows over two axes, which the plan names in another order than the mesh; uneven shares of both parameters."""
    x = torch.arange(8.0, dtype=torch.float64).view(4, 2)
    state = {"lines.0.slope": torch.ones(3, 5, dtype=torch.float64), "lines.0.offset": torch.arange(7.0, dtype=torch.float64)}

    def rank_main(rank: int) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
        inputs = {"x": rt.Input(("B", 2), torch.float64, {"dp": "S(0)", "sp": "S(0)"})}
        chosen = rt.PlanInfo({"dp": 2, "sp": 2}, inputs, {"B": rt.Symbol("batch")}, zero=zero, data_axes=("sp", "dp"))
        trainer = rt.Trainer(_Lines, chosen, state=state, device="cpu", dtype=torch.float64)
        return trainer.step({"x": x}), trainer.full_gradients(), trainer.state_dict()

    for loss, gradients, whole in run_ranks(4, rank_main):
        torch.testing.assert_close(loss, 15 * x[:, 0].mean() + state["lines.0.offset"].pow(2).sum())
        torch.testing.assert_close(gradients["lines.0.slope"], torch.full((3, 5), float(x[:, 0].mean()), dtype=torch.float64))
        torch.testing.assert_close(gradients["lines.0.offset"], 2 * state["lines.0.offset"])
        assert all(torch.equal(whole[name], tensor) for name, tensor in state.items())

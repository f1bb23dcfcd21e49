"""Recomputation: how much less is kept, that random numbers and statistics stay what they were, and what is sent again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import hgc
from hgc import runtime as rt
from hgc._torch_compat import watching_calls
from hgc.backends.parity.threads import run_ranks
from hgc.cost.retention import program_retained
from hgc.cost.symbolic import exact
from hgc.ir.value import info
from hgc.passes.analysis.costs import BlockCosts
from tests.cost.small import gpu_functions, kept_bytes
from tests.distributed.processes import run_processes
from tests.families import FAMILIES

KINDS = ("", "recompute", "recompute-selective")


@cache
def executable(family: str, strategy: str) -> hgc.Executable:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    return hgc.compile(model, batch, plan=strategy)


def on_ranks(made: hgc.Executable, use: Callable[[rt.Trainer], Any]) -> list[Any]:
    return run_ranks(made.plan.devices, lambda rank: use(made.load(device="cpu")))


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_blocks_keep_their_inputs_only(family: str) -> None:
    """Bytes that autograd keeps, as costs predict them, and less than a third of what they are without."""

    def kept(strategy: str) -> tuple[int, int]:
        made = executable(family, strategy)

        def use(trainer: rt.Trainer) -> int:
            known = dict(trainer.model.named_parameters()) | dict(trainer.model.named_buffers())
            return kept_bytes(lambda: trainer.model(**made.example_inputs), known)

        with gpu_functions():
            (found,) = on_ranks(made, use)
        recomputed = {block.body: "full" for block in made.program.blocks() if info(block.node).recompute}
        costs = BlockCosts().run(made.program)
        predicted = program_retained(made.program, costs.bodies, recomputed)
        return found, exact(predicted.saved_bytes + predicted.batch, dict(zip(costs.symbols, (4, 16), strict=True)))

    whole, _ = kept("dp1")
    found, predicted = kept("recompute")
    assert found == predicted
    assert found < whole / 3


@pytest.mark.parametrize("strategy", ["dp1", "dp2", "dp2 zero3"])
def test_dropout_is_repeated_with_the_same_random_numbers(strategy: str) -> None:
    found: dict[str, list[Any]] = {}
    for kind in KINDS:
        made = executable("gpt2", f"{strategy} {kind}")

        def use(trainer: rt.Trainer, made: hgc.Executable = made) -> tuple[list[Tensor], dict[str, Tensor | None]]:
            rt.ops.manual_seed(5)
            return [trainer.step(made.example_inputs) for _ in range(2)], trainer.full_gradients()

        torch.manual_seed(5)  # what a single rank draws from
        found[kind] = on_ranks(made, use)
    for kind in KINDS[1:]:
        for (losses, gradients), (want_losses, want) in zip(found[kind], found[""], strict=True):
            assert want_losses[0] != want_losses[1]  # dropout is on
            assert losses == want_losses
            for name, gradient in want.items():
                torch.testing.assert_close(gradients[name], gradient, msg=name)


def _steps(rank: int, strategy: str) -> tuple[list[float], dict[str, Tensor | None]]:
    torch.manual_seed(0)
    model, batch = FAMILIES["gpt2"]()
    trainer = hgc.compile(model, batch, plan=strategy).load(device="cpu")
    rt.ops.manual_seed(5)
    return [trainer.step(batch).item() for _ in range(2)], trainer.full_gradients()


@pytest.mark.distributed
def test_dropout_on_real_processes() -> None:
    """Along tensor parallelism masks agree, and ranks share torch's own generator."""
    ((want_losses, want), _), ((losses, gradients), _) = (run_processes(2, _steps, f"tp2 {kind}") for kind in ("", "recompute"))
    assert losses == pytest.approx(want_losses, rel=1e-6)
    for name, gradient in want.items():
        torch.testing.assert_close(gradients[name], gradient, msg=name)


def test_statistics_are_updated_once() -> None:
    plain, again = executable("cnn", "dp2"), executable("cnn", "dp2 recompute")

    def use(trainer: rt.Trainer) -> tuple[Tensor, dict[str, Tensor]]:
        return trainer.step(plain.example_inputs), trainer.full_state_dict()

    (want_loss, want), _ = on_ranks(plain, use)
    (loss, state), _ = on_ranks(again, use)
    assert loss == want_loss
    assert all(torch.equal(state[name], tensor) for name, tensor in want.items())
    assert bool((want["blocks.0.norm1.running_mean"] != 0).all())


def test_what_is_sent_again() -> None:
    """``full`` repeats the collectives of a block's forward but the last, whose result backward does not need; ``selective`` none."""

    def sent(kind: str) -> int:
        made = executable("llama", f"tp2 {kind}")

        def use(trainer: rt.Trainer) -> int:
            calls: Counter[str] = Counter()
            with watching_calls(lambda func, *_: calls.update([str(func)])):
                trainer.step(made.example_inputs)
            return sum(count for name, count in calls.items() if name.startswith("_c10d_functional.") and "wait" not in name)

        return int(on_ranks(made, use)[0])

    none, full, selective = map(sent, KINDS)
    layers, forward = 3, 4
    assert full == none + layers * (forward - 1)
    assert selective == none


def test_only_blocks_that_repeat_are_recomputed() -> None:
    made = executable("gpt2", "recompute")
    assert [info(block.node).recompute for block in made.program.blocks()] == [False, True, True, True, False]
    assert "x = rt.recompute(block, x)" in made.code
    assert "transformer.h.0-2 x3: GPT2Block(x_1, 12 weights) -> f32[b, s, 64]  recomputed\n" in str(made.program)
    assert "recomputed in backward" in str(made.draw())
    plain = executable("gpt2", "dp1")
    assert hgc.ir.hashing.program_hash(made.program) != hgc.ir.hashing.program_hash(plain.program)


def test_selective_says_where_it_finds_no_attention() -> None:
    report = executable("cnn", "recompute-selective").program.report
    assert report[-1:] == ["recompute selective: ResidualBlock has no attention, so it keeps all that it saves; use recompute full"]
    for strategy in ("cp2", "sp2"):
        made = executable("llama", f"{strategy} recompute-selective")
        assert "attention of LlamaDecoderLayer sends keys and values to other ranks" in made.program.report[-1]
        assert "rt.recompute" not in made.code

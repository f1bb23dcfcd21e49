"""torch.compile of block bodies: one compilation for each distinct body, whatever the depth, and the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

import hgc
from hgc.backends.parity.case import without_dropout
from hgc.backends.parity.threads import run_ranks
from hgc.runtime.compiled import compile_blocks
from tests.families import FAMILIES


@pytest.mark.parametrize("strategy", ["dp1", "recompute", "recompute-selective"])
def test_each_body_is_compiled_once(strategy: str) -> None:
    torch.manual_seed(0)
    model, batch = FAMILIES["gpt2"]()
    executable = hgc.compile(model, batch, plan=strategy)
    assert len(executable.program.bodies) == 3
    assert sum(1 for _ in executable.program.blocks()) == 5
    compiled: list[int] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        compiled.append(len(graph.graph.nodes))
        return graph.forward

    def rank_main(rank: int) -> None:
        trainer = executable.load(device="cpu")
        loss, gradients = trainer.step(batch), trainer.full_gradients()
        for parameter in trainer.parameters():
            parameter.grad = None
        compile_blocks(trainer.model, backend)
        assert torch.equal(trainer.step(batch), loss)
        assert len(compiled) == 3
        for name, gradient in trainer.full_gradients().items():
            assert gradient is not None
            torch.testing.assert_close(gradient, gradients[name], msg=name)
        trainer.step(batch)
        assert len(compiled) == 3

    with without_dropout():
        run_ranks(1, rank_main)

"""What the transforms mean, without emission or runtime: ranks as threads against the unmodified model, in float64."""

from __future__ import annotations

import pytest
import torch

from hgc.backends.parity.case import precision, to_dtype, without_dropout
from hgc.compiler import distribute
from hgc.ir.program import Program
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tracing import trace
from tests.distributed.lowered import run_lowered
from tests.families import FAMILIES

PLANS = ("dp4", "tp2", "tp4", "dp2 tp2", "tp2 no-sequence-parallel", "dp2 tp2 no-vocab-parallel")


def collectives(program: Program) -> dict[str, int]:
    """How often each collective runs in a step, forward."""
    counts: dict[str, int] = {}
    for block in program.blocks():
        for node in program.body(block.body).graph.nodes:
            if getattr(node.target, "__module__", "") == "hgc.ir.ops.collectives":
                counts[node.target.__name__] = counts.get(node.target.__name__, 0) + 1
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_equal_the_model(family: str) -> None:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    program = trace(model, batch)
    model, batch = model.double(), to_dtype(batch, torch.float64)
    state = {name: t.detach().clone() for name, t in model.state_dict().items()}
    with without_dropout(), precision(torch.float64):
        out = model(**batch)
        loss = out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()
        expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        largest = max(float(g.abs().max()) for g in expected.values())
        for plan in PLANS:
            lowered = distribute(program, Plan(Strategy.parse(plan)))
            found, gradients = run_lowered(lowered, batch, state)
            assert abs(float(found - loss.detach())) < 1e-10 * abs(float(loss.detach())), plan
            assert set(gradients) == set(expected), plan
            for name, gradient in gradients.items():
                scale = max(float(expected[name].abs().max()), 1e-3 * largest)
                assert float((gradient - expected[name]).abs().max()) < 1e-10 * scale, (plan, name)


@pytest.mark.parametrize(("family", "norm_parameters"), [("gpt2", 4), ("bert", 4)])
def test_dropout_and_biases_do_not_stop_a_region(family: str, norm_parameters: int) -> None:
    """Each of the three layers has two regions, with dropout inside both; the bias of a closing product is a summand."""
    model, batch = FAMILIES[family]()
    found = collectives(distribute(trace(model, batch), Plan(Strategy(tp=2))))
    assert found["all_gather"] == found["reduce_scatter"] == 7
    assert found["as_partial"] >= 6
    assert found["copy_in"] >= 3 * norm_parameters


def test_llama_has_the_collectives_of_megatron() -> None:
    """Two gathers and two scatters in each layer, one pair for head and embedding; two norm weights in each layer summed over tp."""
    model, batch = FAMILIES["llama"]()
    program = trace(model, batch)
    assert collectives(distribute(program, Plan(Strategy(tp=2)))) == {"all_gather": 7, "reduce_scatter": 7, "copy_in": 7}
    assert collectives(distribute(program, Plan(Strategy(tp=2, sequence_parallel=False)))) == {"all_reduce": 7, "copy_in": 7}
    assert collectives(distribute(program, Plan(Strategy(dp=4)))) == {"all_reduce": 1}

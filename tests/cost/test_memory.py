"""Memory terms against what trainers really allocate on the ranks of a job, as threads."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import sympy
import torch

from hgc import runtime as rt
from hgc.backends import torchrun
from hgc.backends.parity.threads import run_ranks
from hgc.cost.memory import Memory, memory
from hgc.cost.symbolic import Formulas, exact, largest
from hgc.errors import HgcError
from hgc.ir.program import Program
from hgc.plan import Plan
from tests.cost.small import FAMILIES, costs, lowered, lowered_costs, state_of, traced


def allocated(family: str, program: Program, plan: Plan, folder: Path) -> list[dict[str, int]]:
    """Bytes of each rank after a step of AdamW."""
    torchrun.write(folder, program, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = torchrun.load_model(folder)
    state = {name: tensor.detach() for name, tensor in state_of(traced(family)[0]).items()}
    batch = FAMILIES[family][1](4, 16)

    def rank_main(rank: int) -> dict[str, int]:
        trainer = rt.Trainer(model, info, state=state, device="cpu")
        optimizer = torch.optim.AdamW(trainer.parameters())
        trainer.step(batch)
        optimizer.step()
        moments = [t for kept in optimizer.state.values() for t in kept.values() if t.dim() > 0]
        return {
            "parameters": sum(p.nbytes for p in trainer.parameters()),
            "gradients": sum(p.grad.nbytes for p in trainer.parameters() if p.grad is not None),
            "optimizer": sum(t.nbytes for t in moments),
            "buffers": sum(t.nbytes for t in trainer._buffers.values()),
            "bucket": max((b.flat.nbytes - b.flags.nbytes for b in trainer._reducer._buckets if b.flat is not None), default=0),
        }

    return run_ranks(plan.devices, rank_main)


CASES = [("llama", "dp2 tp2"), ("llama", "dp2 zero3"), ("gpt2", "dp2 zero3"), ("gpt2", "dp2 tp2 zero3"), ("cnn", "dp2")]


@pytest.mark.parametrize(("family", "text"), CASES)
def test_state_is_what_a_trainer_allocates(family: str, text: str, tmp_path: Path) -> None:
    program, plan = lowered(family, text)
    found = memory(program, plan, costs(family))
    ranks = allocated(family, program, plan, tmp_path)
    for term in ("parameters", "gradients", "optimizer", "buffers"):
        assert exact(getattr(found, term), {}) == max(rank[term] for rank in ranks), term
    if not plan.strategy.zero:
        assert exact(found.communication, {}) == ranks[0]["bucket"]


def test_terms_of_a_plan_are_expressions_in_its_sizes() -> None:
    (program, plan), measured = lowered("llama", "dp2 tp2"), lowered_costs("llama", "dp2 tp2")
    found = memory(program, plan, measured)
    b, s = measured.symbols
    assert found.activations == measured.saved_bytes
    assert found.batch == 2 * 8 * b * s / 2
    rows = b / 2 * s
    assert sympy.Poly(found.logits, b, s).coeff_monomial(b * s) >= 2 * 4 * 128 / 2  # the gradient of a rank's half of the vocabulary, twice
    assert found.logits.subs({b: 2, s: 1}) >= 2 * 4 * 128 * rows.subs({b: 2, s: 1})
    assert found.total == sympy.expand(
        found.parameters
        + found.buffers
        + found.gradients
        + found.optimizer
        + found.activations
        + found.batch
        + found.gathered
        + found.communication
        + largest([found.logits, found.workspace])
    )


def test_micro_batches_divide_activations_and_nothing_else() -> None:
    (program, plan), measured = lowered("gpt2", "dp2 zero3"), costs("gpt2")
    one, four = memory(program, plan, measured), memory(program, plan, measured, micro_batches=4)
    b, s = measured.symbols
    assert exact(four.activations, {b: 16, s: 8}) == exact(one.activations, {b: 4, s: 8})
    assert (one.parameters, one.batch, one.optimizer) == (four.parameters, four.batch, four.optimizer)


def test_zero_gathers_a_running_and_a_fetched_block() -> None:
    program, plan = lowered("llama", "dp2 zero3")
    found = memory(program, plan, costs("llama"))
    layer = 4 * (2 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 128)
    root = 4 * (2 * 256 * 64 + 64)
    assert exact(found.gathered, {}) == root + 2 * layer
    assert exact(found.communication, {}) == 2 * max(root, layer)


def test_other_optimizers() -> None:
    program, plan = lowered("cnn", "dp2")
    found: dict[str, Memory] = {name: memory(program, plan, costs("cnn"), name) for name in ("sgd", "momentum", "adamw")}
    assert [found[name].optimizer / found[name].gradients for name in found] == [0, 1, 2]
    with pytest.raises(HgcError, match="the optimizer 'adagrad' is not known; expected one of sgd, momentum"):
        memory(program, plan, costs("cnn"), "adagrad")


def test_terms_evaluate_for_many_sizes_at_once() -> None:
    (program, plan), measured = lowered("llama", "dp2 tp2"), lowered_costs("llama", "dp2 tp2")
    values = Formulas(memory(program, plan, measured).expressions(), measured.symbols)({"b": [4, 8], "s": 16})
    terms = [values[name] for name in values if name not in ("total", "logits", "workspace")]
    expected = sum(terms) + [max(pair) for pair in zip(values["logits"], values["workspace"], strict=True)]
    assert values["total"].tolist() == expected.tolist()

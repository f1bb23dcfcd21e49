"""Stages of a program: composed on one device they are the program, and each is a program of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor

import hgc
from hgc.errors import PlanError, ShardingError
from hgc.ir.hashing import program_hash, structure_hash
from hgc.ir.program import Program
from hgc.ir.value import value
from hgc.ir.verifier import verify
from hgc.passes.sharding.even_stages import even_stages
from hgc.passes.sharding.stages import cut, run_stages
from hgc.plan import Plan, Stage
from tests.families import FAMILIES

Run = Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], Tensor]


def plan_of(*counts: int) -> Plan:
    return Plan(stages=tuple(Stage(count, index) for index, count in enumerate(counts)))


def traced(family: str) -> tuple[Program, dict[str, Tensor], dict[str, Tensor]]:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    return hgc.trace(model, batch), batch, {name: tensor.detach() for name, tensor in model.state_dict().items()}


def loss_and_gradients(run: Run, program: Program, batch: dict[str, Tensor], state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    names = {alias: entry for entry in program.state.values() for alias in (entry.name, *entry.aliases)}
    own = {n: t.clone().requires_grad_(n in names and names[n].value.requires_grad) for n, t in state.items()}
    torch.manual_seed(1)
    loss = run(batch, own)
    loss.backward()
    return loss.detach(), {n: t.grad for n, t in own.items() if t.grad is not None}


@pytest.mark.parametrize("family", ["gpt2", "llama", "bert", "t5", "vit", "cnn"])
def test_stages_compose_to_the_program(family: str) -> None:
    program, batch, state = traced(family)
    blocks = len(list(program.blocks()))
    expected, gradients = loss_and_gradients(program.run, program, batch, state)
    for plan in (plan_of(*[1] * blocks), plan_of(2, blocks - 2)):
        stages = cut(program, plan)
        found, own = loss_and_gradients(lambda b, s, stages=stages: run_stages(stages, b, s), program, batch, state)
        assert torch.equal(found, expected)
        assert own.keys() == gradients.keys()
        assert all(torch.equal(own[name], gradients[name]) for name in own)
        for stage in stages:
            stage.reference = stage.copy()
            verify(stage)


def test_tables_are_computed_again_and_activations_sent() -> None:
    program, _, _ = traced("llama")
    stages = cut(program, plan_of(2, 1, 1, 1))
    assert [[str(node.target) for node in stage.inputs()] for stage in stages] == [
        ["input_ids"],
        ["input_ids", "x_2"],
        ["input_ids", "x_3"],
        ["labels", "x_4"],
    ]
    assert [stage.results for stage in stages] == [("x_2",), ("x_3",), ("x_4",), ()]
    assert all(value(stage.inputs()[-1]).requires_grad for stage in stages[1:])
    assert "model.embed_tokens.weight" not in stages[1].state


def test_skip_edges_go_to_every_stage_that_reads() -> None:
    """The encoder's output and the position biases of T5; decoder ids come from the labels and are made where they are read."""
    program, _, _ = traced("t5")
    stages = cut(program, plan_of(*[1, 1, 1, 1, 1, 1, 1, 1, 1, 1]))
    readers: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for node in stage.inputs():
            readers.setdefault(str(node.target), []).append(index)
    crossing = {name: readers[name] for stage in stages for name in stage.results}
    assert sorted(crossing.values(), key=len)[-1] == [6, 7, 8]
    assert [2, 3] in crossing.values()
    assert readers["labels"] == [5, 9]


def test_equal_stages_have_one_structure() -> None:
    program, _, _ = traced("gpt2")
    first, middle, other, last = cut(program, plan_of(2, 1, 1, 1))
    assert structure_hash(middle) == structure_hash(other)
    assert len({structure_hash(stage) for stage in (first, middle, last)}) == 3
    assert program_hash(middle) != program_hash(other)


def test_tied_parameters_are_in_both_stages() -> None:
    program, _, _ = traced("gpt2")
    stages = cut(program, plan_of(2, 1, 2))
    assert stages[0].state["transformer.wte.weight"].stages == (0, 2)
    assert stages[2].state["transformer.wte.weight"].stages == (0, 2)
    held = [name for stage in stages for name in stage.state]
    assert sorted(set(held)) == sorted(program.state)
    assert len(held) == len(program.state) + 1


def test_wrong_counts_are_refused_with_the_right_number() -> None:
    program, _, _ = traced("gpt2")
    with pytest.raises(PlanError, match=r"have 2 \+ 2 = 4 blocks, but GPT2LMHeadModel has 5; give the last stage 3"):
        cut(program, plan_of(2, 2))
    with pytest.raises(PlanError, match="use at most 5 stages"):
        cut(program, plan_of(*[1] * 6))


def test_a_lowered_program_is_not_cut() -> None:
    program, _, _ = traced("gpt2")
    with pytest.raises(ShardingError, match="cut the traced program"):
        cut(hgc.distribute(program, Plan(hgc.Strategy(dp=2))), plan_of(2, 3))


def test_even_stages() -> None:
    program, _, _ = traced("gpt2")
    assert [(s.blocks, s.first_rank) for s in even_stages(program, 2, hgc.Strategy(dp=2))] == [(3, 0), (2, 2)]
    assert [s.first_rank for s in even_stages(program, 2, virtual=2)] == [0, 1, 0, 1]
    assert [s.first_rank for s in even_stages(program, 2, virtual=2, vee=True)] == [0, 1, 1, 0]
    assert sum(s.blocks for s in even_stages(program, 4)) == 5
    with pytest.raises(PlanError, match="6 stages need 6 blocks or more"):
        even_stages(program, 6)

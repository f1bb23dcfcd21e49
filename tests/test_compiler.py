"""The public entry: plans in every form, the pipeline, and what protects users from their own passes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import hgc
from hgc.errors import PlanError, ShardingError, VerifyError
from hgc.ir import ops
from hgc.passes.edit import replace_call
from tests.families import FAMILIES

aten = torch.ops.aten


@pytest.fixture(scope="module")
def traced() -> hgc.Program:
    return hgc.trace(*FAMILIES["llama"]())


def test_a_plan_may_be_given_in_every_form(tmp_path: Path) -> None:
    model, batch = FAMILIES["llama"]()
    hgc.Plan(hgc.Strategy(tp=2)).save(tmp_path / "plan.json")
    forms = [
        "tp2",
        hgc.Strategy(tp=2),
        hgc.Plan(hgc.Strategy(tp=2)),
        str(tmp_path / "plan.json"),
        lambda program, cluster: hgc.Plan(hgc.Strategy(tp=2)),
    ]
    codes = {hgc.compile(model, batch, plan=form).code for form in forms}
    assert len(codes) == 1


def test_auto_uses_every_device_and_says_why() -> None:
    model, batch = FAMILIES["llama"]()
    executable = hgc.compile(model, batch, cluster=hgc.Cluster.local(4))
    assert executable.plan.devices == 4
    assert executable.plan.predicted.step_s
    assert executable.plan.predicted.memory_bytes
    assert any("the search" in note for note in executable.plan.notes)


def test_auto_names_the_reasons_if_nothing_fits() -> None:
    model, batch = FAMILIES["llama"]()
    with pytest.raises(PlanError, match=r"no plan runs LlamaForCausalLM on 7 devices .*cannot split"):
        hgc.compile(model, batch, cluster=hgc.Cluster.local(7))


def test_heads_that_do_not_divide_are_refused_with_the_possible_sizes(traced: hgc.Program) -> None:
    with pytest.raises(ShardingError, match=r"8 heads and 4 key-value heads, which tp=8 does not divide; possible tp sizes: 1, 2, 4"):
        hgc.distribute(traced, hgc.Plan(hgc.Strategy(tp=8)))


def test_a_batch_that_does_not_divide_is_refused(traced: hgc.Program) -> None:
    with pytest.raises(ShardingError, match="dp=3 does not divide"):
        hgc.distribute(traced, hgc.Plan(hgc.Strategy(dp=3)))


def test_a_plan_for_another_program_is_refused() -> None:
    model, batch = FAMILIES["llama"]()
    plan = hgc.compile(model, batch, plan="tp2").plan
    other, other_batch = FAMILIES["gpt2"]()
    with pytest.raises(PlanError, match="was made for program"):
        hgc.compile(other, other_batch, plan=plan)


@dataclass(frozen=True)
class DropAllReduce(hgc.Transform):
    name = "drop-all-reduce"

    def run(self, program: hgc.Program, plan: hgc.Plan) -> hgc.Program:
        for body in program.bodies.values():
            for node in body.graph.find_nodes(op="call_function", target=ops.all_reduce):
                node.replace_all_uses_with(node.args[0])
                body.graph.erase_node(node)
        return program


@dataclass(frozen=True)
class GeluForSilu(hgc.Transform):
    name = "gelu-for-silu"
    replaces_operators = True

    def run(self, program: hgc.Program, plan: hgc.Plan) -> hgc.Program:
        for body in program.bodies.values():
            for node in body.graph.find_nodes(op="call_function", target=aten.silu.default):
                replace_call(node, aten.gelu.default, node.args)
            body.recompile()
        return program


def test_a_pass_that_drops_a_collective_is_refused() -> None:
    model, batch = FAMILIES["llama"]()
    pipeline = hgc.default_pipeline().append(DropAllReduce())
    with pytest.raises(VerifyError, match="axis 'dp'"):
        hgc.compile(model, batch, plan="dp2", pipeline=pipeline)


def test_a_pass_that_changes_what_a_block_computes_is_refused() -> None:
    model, batch = FAMILIES["llama"]()
    with pytest.raises(VerifyError, match="'gelu-for-silu' changed what LlamaDecoderLayer computes"):
        hgc.compile(model, batch, plan="dp2", pipeline=hgc.default_pipeline().prepend(GeluForSilu()))


def test_a_pass_that_replaces_operators_silently_is_refused() -> None:
    model, batch = FAMILIES["llama"]()

    @dataclass(frozen=True)
    class Silent(GeluForSilu):
        replaces_operators = False

    with pytest.raises(VerifyError, match="gelu"):
        hgc.compile(model, batch, plan="dp2", pipeline=hgc.default_pipeline().prepend(Silent()))


def test_transforms_never_change_their_input(traced: hgc.Program) -> None:
    before = str(traced.root.graph), {name: str(body.graph) for name, body in traced.bodies.items()}
    hgc.distribute(traced, hgc.Plan(hgc.Strategy(dp=2, tp=2)))
    assert before == (str(traced.root.graph), {name: str(body.graph) for name, body in traced.bodies.items()})


def test_an_unknown_pass_name_lists_the_known_ones() -> None:
    with pytest.raises(PlanError, match=r"no pass 'fuse'; it has pad-vocabulary, data-parallel, .*tensor-parallel, recompute"):
        hgc.default_pipeline().without("fuse")


def test_what_sharding_asks_of_sizes_is_in_the_program(traced: hgc.Program) -> None:
    """Sequence parallelism needs a sequence that tp divides, whatever the example's was; without it any length will do."""
    split = hgc.distribute(traced, hgc.Plan(hgc.Strategy(tp=4)))
    assert [str(relation) for relation in split.assumptions] == ["Eq(Mod(s, 4), 0)"]
    assert not hgc.distribute(traced, hgc.Plan(hgc.Strategy(tp=4, sequence_parallel=False))).assumptions

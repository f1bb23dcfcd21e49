"""Memory terms against what trainers really allocate on the ranks of a job, as threads."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import sympy
import torch

from hgc import runtime as rt
from hgc.backends import torchrun
from hgc.backends.parity.threads import run_ranks
from hgc.cluster import Cluster
from hgc.cost.execution import Execution
from hgc.cost.memory import Memory, Reserve, memory, reserve_of
from hgc.cost.symbolic import Formulas, exact, largest
from hgc.errors import HgcError
from hgc.ir.program import Program
from hgc.plan import Plan, Precision
from hgc.runtime.state import plain
from tests.cost.small import FAMILIES, costs, lowered, lowered_costs, state_of, traced

MEGATRON = Execution(autocast=False)


def allocated(family: str, program: Program, plan: Plan, folder: Path, precision: Precision) -> list[dict[str, int]]:
    """Bytes of each rank after a step of AdamW; parameters with the copies that the model computes with."""
    torchrun.write(folder, program, plan)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = torchrun.load_model(folder)
    state = {name: tensor.detach() for name, tensor in state_of(traced(family)[0]).items()}
    batch = FAMILIES[family][1](4, 16)

    def rank_main(rank: int) -> dict[str, int]:
        trainer = rt.Trainer(model, info, state=state, device="cpu", precision=precision)
        optimizer = torch.optim.AdamW(trainer.parameters())
        trainer.step(batch)
        optimizer.step()
        moments = [t for kept in optimizer.state.values() for t in kept.values() if t.dim() > 0]
        return {
            "parameters": _distinct_bytes([t for share in trainer._shares.values() for t in (share.parameter, plain(share.held))]),
            "gradients": sum(p.grad.nbytes for p in trainer.parameters() if p.grad is not None),
            "optimizer": sum(t.nbytes for t in moments),
            "buffers": sum(t.nbytes for t in trainer._buffers.values()),
            "bucket": max((b.flat.nbytes - b.flags.nbytes for b in trainer._reducer._buckets if b.flat is not None), default=0),
        }

    return run_ranks(plan.devices, rank_main)


def _distinct_bytes(tensors: list[torch.Tensor]) -> int:
    return sum({t.data_ptr(): t.nbytes for t in tensors if t.numel()}.values())


WIDE = Precision()
AUTOCAST = Precision(compute="bfloat16", parameters="float32")
MASTER = Precision(parameters="bfloat16", master="float32", gradients="float32")
NARROW = Precision(parameters="bfloat16")
CASES = [
    ("llama", "dp2 tp2", WIDE),
    ("llama", "dp2 zero3", WIDE),
    ("gpt2", "dp2 zero3", WIDE),
    ("gpt2", "dp2 tp2 zero3", WIDE),
    ("cnn", "dp2", WIDE),
    ("llama", "dp2 zero1", WIDE),
    ("gpt2", "dp4 zero2", WIDE),
    ("gpt2", "dp2", MASTER),
    ("gpt2", "dp2", NARROW),
    ("gpt2", "dp2 zero3", AUTOCAST),
    ("gpt2", "dp2 zero1", MASTER),
]


@pytest.mark.parametrize(("family", "text", "precision"), CASES)
def test_state_is_what_a_trainer_allocates(family: str, text: str, precision: Precision, tmp_path: Path) -> None:
    program, plan = lowered(family, text)
    found = memory(program, replace(plan, precision=precision), costs(family))
    ranks = allocated(family, program, plan, tmp_path, precision)
    assert exact(found.parameters + found.master, {}) == max(rank["parameters"] for rank in ranks)
    for term in ("gradients", "optimizer", "buffers"):
        assert exact(getattr(found, term), {}) == max(rank[term] for rank in ranks), term
    if not plan.strategy.zero:
        assert exact(found.communication, {}) == ranks[0]["bucket"]


def test_bytes_of_a_parameter_in_mixed_precision() -> None:
    """Megatron-LM's 2 + 4 + 4 + 8, sharded over data parallel ranks what ZeRO shards, and FSDP's 4 + 4 + 8 of a share."""
    program, plan = lowered("llama", "dp2")
    numbers = sum(int(entry.value.numel) for entry in program.state.values() if entry.kind == "parameter")

    def state(zero: int, precision: Precision, micro_batches: int = 1) -> dict[str, float]:
        strategy = replace(plan.strategy, zero=zero)
        terms = memory(
            program, replace(plan, precision=precision), costs("llama"), "adamw", micro_batches, strategy=strategy, execution=MEGATRON
        )
        return {name: int(getattr(terms, name)) / numbers for name in ("parameters", "master", "gradients", "optimizer", "gathered")}

    assert state(0, MASTER) == {"parameters": 2, "master": 4, "gradients": 4, "optimizer": 8, "gathered": 0}
    assert state(1, MASTER, 4) == {"parameters": 2, "master": 0, "gradients": 2 + 4, "optimizer": 4, "gathered": 2}
    assert state(2, MASTER, 4) == {"parameters": 2, "master": 0, "gradients": 2, "optimizer": 4, "gathered": 2}
    fsdp = state(3, Precision(compute="bfloat16", parameters="float32"))
    assert (fsdp["parameters"], fsdp["gradients"], fsdp["optimizer"]) == (2, 2, 4)
    assert fsdp["gathered"] == state(3, WIDE)["gathered"] / 2


def test_activations_in_flight_and_recomputed() -> None:
    (program, plan), measured = lowered("gpt2", "dp2 tp2"), lowered_costs("gpt2", "dp2 tp2")
    one, four = memory(program, plan, measured), memory(program, plan, measured, in_flight=4)
    assert four.activations == sympy.expand(4 * one.activations)
    assert (one.recomputed, four.workspace, four.optimizer) == (0, one.workspace, one.optimizer)
    block = measured.bodies["GPT2Block"]
    full = memory(program, plan, measured, strategy=replace(plan.strategy, recompute="full"))
    assert full.recomputed == block.saved_bytes
    assert one.activations - full.activations == 3 * block.saved_bytes
    sizes = dict.fromkeys(measured.symbols, 16)
    core = memory(program, plan, measured, strategy=replace(plan.strategy, recompute="selective"))
    assert exact(full.activations, sizes) < exact(core.activations, sizes) < exact(one.activations, sizes)
    assert exact(core.activations + 3 * core.recomputed, sizes) == exact(one.activations, sizes)


def test_what_the_device_takes_for_itself() -> None:
    (program, plan), measured = lowered("gpt2", "dp2 tp2"), lowered_costs("gpt2", "dp2 tp2")
    none = memory(program, plan, measured, reserve=reserve_of(Cluster.local(1).nodes[0].device))
    some = memory(program, plan, measured, reserve=Reserve(1000, 100), execution=Execution(fragmentation=0.5))
    sizes = dict.fromkeys(measured.symbols, 16)
    assert none.reserve == 0
    assert exact(2 * some.reserve, sizes) == 2 * (1000 + 3 * 100) + exact(none.total, sizes)


def test_a_framework_may_have_its_own_buffers_for_traffic() -> None:
    (program, plan), measured = lowered("gpt2", "dp2 tp2"), lowered_costs("gpt2", "dp2 tp2")
    assert memory(program, plan, measured, execution=Execution(traffic_bytes=12345)).communication == 12345
    assert reserve_of(Cluster.preset("h100").nodes[0].device).context_bytes > 2**29


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
        + found.master
        + found.buffers
        + found.reserve
        + found.gradients
        + found.optimizer
        + found.activations
        + found.batch
        + found.gathered
        + found.communication
        + largest([found.logits, found.workspace + found.recomputed])
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
    terms = [values[name] for name in values if name not in ("total", "logits", "workspace", "recomputed")]
    passing = zip(values["logits"], values["workspace"] + values["recomputed"], strict=True)
    expected = sum(terms) + [max(pair) for pair in passing]
    assert values["total"].tolist() == expected.tolist()

"""The verifier accepts what the transforms make, finds every planted fault, and accuses no edit that keeps the meaning."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from torch import fx

from hgc.backends.parity.case import without_dropout
from hgc.errors import VerifyError
from hgc.ir import ops
from hgc.ir.placement import Partial
from hgc.ir.program import Program
from hgc.ir.rules.collectives import COLLECTIVES
from hgc.ir.value import Info, is_tensor, set_info, value
from hgc.ir.verifier import verify
from tests.distributed.lowered import run_lowered
from tests.ir.fault_sites import Fault, graphs, record_again
from tests.ir.faults import OTHER_FAULTS
from tests.ir.faults_of_collectives import COLLECTIVE_FAULTS
from tests.ir.lowered_programs import MODELS, PLANS, batch, lowered, model

PROGRAMS = [(name, plan) for name in MODELS for plan in PLANS if not (name == "embedding" and "no-vocab" in plan)]
"""An embedding and a head alone have nothing else to split than the vocabulary."""
CASES = 18
"""Of each fault, on programs at random."""
aten = torch.ops.aten


@pytest.mark.parametrize(("name", "plan"), PROGRAMS)
def test_lowered_programs_are_accepted_and_right(name: str, plan: str) -> None:
    """Accepted by the verifier, and equal to the model in loss and every gradient: the verifier is tried on true programs."""
    program, source = lowered(name, plan), model(name)
    verify(program)
    parameters = dict(source.named_parameters())
    with without_dropout():
        loss = source(**batch())
        expected = dict(zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True))
        found, gradients = run_lowered(program, batch(), {n: t.detach() for n, t in source.state_dict().items()})
    torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
    assert set(gradients) == set(expected)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=1e-9, atol=1e-12)


def accused(program: Program) -> str:
    """What the verifier says, ``""`` if nothing."""
    try:
        verify(program)
    except VerifyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("fault", [*COLLECTIVE_FAULTS, *OTHER_FAULTS], ids=lambda f: f.__name__)
def test_every_planted_fault_is_found(fault: Fault) -> None:
    """A fault of collectives half of the time in the transform's good faith: what follows from it is recorded too."""
    rng, planted = random.Random(fault.__name__), 0
    for attempt in range(20 * CASES):
        name, plan = rng.choice(PROGRAMS)
        program = lowered(name, plan).copy()
        done = fault(program, rng)
        if not done:
            continue
        believed = fault in COLLECTIVE_FAULTS and planted % 2 == 1
        if believed:
            record_again(program)
        assert accused(program), f"{name} under {plan}, attempt {attempt}: {done}{' and recorded it' if believed else ''}, unnoticed"
        planted += 1
        if planted == CASES:
            return
    assert planted == CASES, f"only {planted} cases of {fault.__name__}; a program that has more to break is missing"


# -- edits that keep the meaning ------------------------------------------------------------------------------------------------------


def recompile(program: Program, rng: random.Random) -> None:
    for body in program.bodies.values():
        body.graph.lint()
        body.recompile()


def rename(program: Program, rng: random.Random) -> None:
    for graph in graphs(program):
        for index, node in enumerate(graph.nodes):
            node.name = f"renamed_{index}"


def reorder(program: Program, rng: random.Random) -> None:
    """Any order in which every operand comes first."""
    for graph in graphs(program):
        body = [n for n in graph.nodes if n.op == "call_function"]
        waiting = {n: sum(source.op == "call_function" for source in n.all_input_nodes) for n in body}
        ready, output = [n for n in body if not waiting[n]], next(n for n in graph.nodes if n.op == "output")
        while ready:
            node = ready.pop(rng.randrange(len(ready)))
            output.prepend(node)
            for user in node.users:
                if user.op == "call_function":
                    waiting[user] -= 1
                    ready += [user] * (not waiting[user])
        graph.lint()


def dead_code(program: Program, rng: random.Random) -> None:
    """Work that nobody reads; after any value, sharded or whole."""
    for graph in graphs(program):
        output = next(n for n in graph.nodes if n.op == "output")
        for node in [n for n in graph.nodes if n is not output and is_tensor(n) and not _partial(n)]:
            if rng.random() < 0.3:
                with graph.inserting_before(output):
                    dead = graph.call_function(aten.relu.default, (node,))
                set_info(dead, Info(value(node)))


def _partial(node: fx.Node) -> bool:
    """A sum of what is positive is not what is positive of the sum: no rule."""
    return Partial() in dict(value(node).placements).values()


def twin(program: Program, rng: random.Random) -> None:
    """A redistribution once more beside the first, for one of its users."""
    for graph in graphs(program):
        for node in [n for n in graph.nodes if n.target in COLLECTIVES]:
            user = rng.choice(list(node.users))
            with graph.inserting_after(node):
                again = graph.call_function(node.target, node.args, node.kwargs)
            again.meta = dict(node.meta)
            user.replace_input_with(node, again)


def copied(program: Program, rng: random.Random) -> None:
    program.root = program.copy().root


@pytest.mark.parametrize("edit", [recompile, rename, reorder, dead_code, twin, copied], ids=lambda f: f.__name__)
def test_edits_that_keep_the_meaning_are_not_accused(edit: Callable[[Program, random.Random], None]) -> None:
    for name, plan in PROGRAMS:
        for seed in range(3):
            program = lowered(name, plan).copy()
            edit(program, random.Random(seed))
            verify(program)


def test_a_fault_is_named() -> None:
    """Node, axis, expected and found, in one sentence."""
    program = lowered("feedforward", "tp2 no-sequence-parallel").copy()
    node = next(n for graph in graphs(program) for n in graph.nodes if n.target is ops.copy_in)
    node.replace_all_uses_with(node.args[0])
    node.graph.erase_node(node)
    with pytest.raises(VerifyError, match=r"gradient of '\w+' from .* is partial on axis 'tp', so it must be R there, found I"):
        verify(program)

"""Programs that are no chains: T5's encoder output goes to every decoder block, and the search prices and runs what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hgc import compiler
from hgc.automatic import Judge, Lower
from hgc.cluster import Cluster
from hgc.compiler import search_planner
from hgc.cost.execution import Execution
from hgc.cost.symbolic import ProgramCosts
from hgc.ir.program import Program
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.pipeline import Pipeline, measured
from hgc.passes.sharding.stages import cut, stage_edges
from hgc.plan import Plan, Stage
from hgc.simulation import stage_programs
from hgc.strategy import Strategy
from tests.distributed.pipelines import check_parity, subject


def _measure(program: Program, plan: Plan) -> tuple[Program, ProgramCosts]:
    (found,) = stage_programs(program, plan, compiler.distribute)
    return found.program, found.costs


@pytest.fixture(scope="module")
def blocks() -> ProgramBlocks:
    return ProgramBlocks(subject("t5").program, Cluster.local(2), _measure)


def test_who_reads_what(blocks: ProgramBlocks) -> None:
    """The same edges as those of a pipeline of single blocks; the encoder's output has as many readers as the decoder has layers."""
    stages = tuple(Stage(1, rank, Strategy()) for rank in range(len(blocks.kinds)))
    edges = {(each.maker, reader) for each in blocks.crossings for reader in each.readers}
    assert edges == set(stage_edges(cut(blocks.program, Plan(stages=stages))))
    assert any(len(each.readers) > 1 and each.readers[0] > each.maker + 1 and each.has_gradient for each in blocks.crossings)


def test_skip_edges_cost_the_stages_that_read_them(blocks: ProgramBlocks) -> None:
    """A cut inside the decoder sends the encoder's output beside the hidden states, a cut inside the encoder does not."""
    problem = blocks.pipeline([Strategy()], stages=2, micro_batches=2)
    encoded = next(each for each in blocks.crossings if len(each.readers) > 1 and each.readers[0] > each.maker + 1)
    arrival = next(each for each in problem.arrivals if (each.maker, each.readers) == (encoded.maker, encoded.readers))
    assert arrival.time_s[0] > 0
    assert arrival.saved[0] > 0
    inside_decoder, inside_encoder = encoded.readers[0] + 1, 3
    assert arrival in [each for _, each in problem.arriving(inside_decoder, problem.blocks)]
    assert _stage_s(problem, inside_decoder) - _alone_s(problem, inside_decoder) >= 2 * arrival.time_s[0] * 0.9
    near = [each for each in problem.arrivals if each.maker < inside_encoder <= each.readers[-1]]
    assert _stage_s(problem, inside_encoder) - _alone_s(problem, inside_encoder) == pytest.approx(sum(each.time_s[0] for each in near))


def _stage_s(problem: Pipeline, start: int) -> float:
    return measured(problem, 1, start, (0,) * (problem.blocks - start)).micro_s


def _alone_s(problem: Pipeline, start: int) -> float:
    return float(problem.micro_s[start:, 0].sum())


def test_shared_values_are_held_once(blocks: ProgramBlocks) -> None:
    """What several blocks of a stage read is counted for the first of them, not for each."""
    problem = blocks.pipeline([Strategy(dp=2)], stages=1, micro_batches=1)
    shared = [each for each in problem.arrivals if each.saved.any()]
    assert shared
    taken = np.zeros(problem.blocks)
    for each in shared:
        taken[list(each.readers)] += each.saved[0]
    whole = np.array([blocks._of(kind, Strategy(dp=2), 1, blocks.device)[3] for kind in blocks.kinds])
    assert np.all(taken < whole)
    assert problem.saved[:, 0] == pytest.approx(whole - taken)
    held = problem.numbers(0, 0, problem.blocks).memory[:, 0] - problem.state[:, 0] - problem.saved[:, 0]
    assert held.sum() == pytest.approx(sum(each.saved[0] for each in shared))


def test_parts_that_take_turns_wait_for_messages_only_if_senders_do(blocks: ProgramBlocks) -> None:
    usual = blocks.pipeline([Strategy()], 2, 2, virtual=2)
    waiting = ProgramBlocks(blocks.program, blocks.cluster, _measure, execution=Execution(sends_block=True)).pipeline([Strategy()], 2, 2, 2)
    assert all(not np.any(each.time_s) for each in usual.arrivals)
    assert all(np.all(each.time_s > 0) for each in waiting.arrivals)


def test_plans_of_such_programs_run(tmp_path: Path) -> None:
    plan = search_planner(fix={"pp": 2, "tp": 1}).run(subject("t5").program, Cluster.local(2))
    assert {stage.first_rank for stage in plan.stages} == {0, 1}
    check_parity(subject("t5"), lambda _: plan, tmp_path / "out")


@pytest.mark.parametrize("lower", [compiler.distribute, Judge(compiler.distribute)._lower], ids=["distribute", "judge"])
def test_tied_parameters_of_plans_that_share_lowering(lower: Lower) -> None:
    """The last stage of another plan has another number: what is shared with it must not say whose parameters are whose."""
    program, known = subject("gpt2").program, dict[tuple[str, str], object]()
    count = len(list(program.blocks()))
    for stages in (3, 2):
        sizes = [1] * (stages - 1) + [count - stages + 1]
        plan = Plan(stages=tuple(Stage(size, rank, Strategy()) for rank, size in enumerate(sizes)), micro_batches=2)
        shared = stage_programs(program, plan, lower, known=known)  # type: ignore[arg-type]
        holders = {entry.stages for stage in shared for entry in stage.program.state.values() if entry.stages}
        assert holders == {(0, stages - 1)}

"""Clusters whose devices differ: pace and memory of each stage count, in the numbers, in the search, and in what the judge lets fit."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from hgc import compiler
from hgc.cluster import Cluster, Link
from hgc.compiler import search_planner
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.partition import best_cuts
from hgc.passes.sharding.search.pipeline import Pipeline, Stages, alike
from hgc.strategy import Strategy
from tests.distributed.pipelines import check_parity, subject

LINK = Link(latency_s=1e-4, bytes_per_s=1e9)


def cluster(per_node: int, slower: float = 1.0, memory: tuple[float, float] = (1.0, 1.0)) -> Cluster:
    """Two nodes; devices of the second are so many times as slow, and both have shares of this machine's memory."""
    node = Cluster.local(per_node).nodes[0]
    rates = {name: getattr(node.device, name) / slower for name in ("memory_bytes_per_s", "float32_flops_per_s", "bfloat16_flops_per_s")}
    slow = replace(node.device, name="slow", kernels=replace(node.device.kernels, launch_s=node.device.kernels.launch_s * slower), **rates)
    devices = [replace(each, memory_bytes=int(each.memory_bytes * share)) for each, share in zip((node.device, slow), memory, strict=True)]
    return Cluster(tuple(replace(node, device=device) for device in devices), LINK)


def _random(seed: int) -> Pipeline:
    draw = np.random.default_rng(seed)
    blocks, strategies, stages = 5, 3, int(draw.integers(2, 4))
    tables = [draw.uniform(0.5, 2.0, (blocks, strategies)) for _ in range(5)]
    pace, room = (1.0, *draw.uniform(1.0, 3.0, stages - 1)), (*draw.uniform(1.0, 2.0, stages - 1), 1.0)
    limit = float(draw.uniform(4.0, 12.0))
    switches = np.full((strategies, strategies), 100.0)
    np.fill_diagonal(switches, 0.0)
    return Pipeline(*tables, switches, stages, 4, limit, tuple(range(blocks)), pace=pace, room=room)


def _step_s(problem: Pipeline, spans: list[tuple[int, int]]) -> float:
    """Written out: each stage with the strategy with which it is busy for the shortest time, of those that fit."""
    longest_s = sum_s = 0.0
    for stage, (start, end) in enumerate(spans):
        alive = min(problem.stages - stage, problem.micro_batches)
        offers = [(np.inf, np.inf, np.inf)]
        for choice in range(3):
            part = (slice(start, end), choice)
            held = problem.state[part].sum() + alive * problem.saved[part].sum() + problem.passing[part].max()
            micro_s, last_s = (problem.pace[stage] * numbers[part].sum() for numbers in (problem.micro_s, problem.last_s))
            if held <= problem.limit * problem.room[stage]:
                offers.append((problem.micro_batches * micro_s + last_s, micro_s, last_s))
        _, micro_s, last_s = min(offers)
        longest_s, sum_s = max(longest_s, micro_s), sum_s + micro_s + last_s
    return (problem.micro_batches - 1) * longest_s + sum_s


@pytest.mark.parametrize("seed", range(40))
def test_cuts_against_all_cuts(seed: int) -> None:
    problem = _random(seed)
    cuts = itertools.combinations(range(1, problem.blocks), problem.stages - 1)
    best = min(_step_s(problem, list(itertools.pairwise((0, *ends, problem.blocks)))) for ends in cuts)
    found = best_cuts(problem, Stages(problem, alike))
    assert (found.step_s if found is not None else np.inf) == pytest.approx(best)


@cache
def _blocks() -> ProgramBlocks:
    return ProgramBlocks(subject("llama").program, cluster(1), search_planner().measure)


def test_pace_and_room_of_stages() -> None:
    blocks = _blocks().elsewhere(cluster=cluster(1, slower=3.0, memory=(1.0, 0.5)))
    problem = blocks.pipeline([Strategy()], stages=2, micro_batches=2)
    assert problem.pace == pytest.approx((1.0, 3.0), rel=0.05)
    assert problem.room == pytest.approx((2.0, 1.0), rel=0.05)
    (whole,) = {blocks.pipeline([Strategy(dp=2)], stages=1, micro_batches=1).pace}
    assert whole == ()


def test_slow_devices_get_fewer_blocks() -> None:
    """And the simulator, which knows each stage's devices, has that plan faster than the one for equal devices."""
    planner = search_planner(fix={"pp": 2, "micro_batches": 4}, forbid={"schedule": "interleaved"})
    unlike = cluster(1, slower=3.0)
    usual, found = (planner.search(_blocks().elsewhere(cluster=each)).best.plan for each in (cluster(1), unlike))

    def first(plan: object) -> int:
        return sum(stage.blocks for stage in plan.stages if stage.first_rank == 0)  # type: ignore[attr-defined]

    assert first(found) > first(usual)
    program = subject("llama").program
    assert compiler.simulate(program, found, unlike).step_s < compiler.simulate(program, usual, unlike).step_s


def test_what_fits_is_judged_device_by_device() -> None:
    """A stage that needs more than the smaller devices have is put on the larger ones."""
    planner = search_planner(fix={"pp": 2, "recompute": "none"}, forbid={"schedule": "interleaved"})
    usual = planner.search(_blocks()).best
    small = usual.memory_bytes * 0.8 / Cluster.local(1).nodes[0].device.memory_bytes
    found = planner.search(_blocks().elsewhere(cluster=cluster(1, memory=(1.0, small)))).best
    assert found.fits
    held = compiler.simulate(subject("llama").program, found.plan, cluster(1)).on_devices
    assert max(each.total for each in held if 1 in each.ranks) <= usual.memory_bytes * 0.8
    assert max(each.total for each in held if 0 in each.ranks) > usual.memory_bytes * 0.8


def test_plans_for_unlike_devices_run(tmp_path: Path) -> None:
    plan = search_planner(fix={"pp": 2}).run(subject("llama").program, cluster(2, slower=2.0))
    check_parity(subject("llama"), lambda _: plan, tmp_path / "out")

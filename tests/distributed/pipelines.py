"""Pipelined programs on ranks that are threads: compiled, emitted, loaded, trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hgc
from hgc.backends import torchrun
from hgc.backends.parity import reference
from hgc.backends.parity.case import Case, Outcome, without_dropout
from hgc.backends.parity.compare import compare
from hgc.backends.parity.threads import run_ranks
from hgc.backends.parity.verify import first_step_in_float64, make_case
from hgc.backends.parity.worker import run_rank
from hgc.compiler import distribute_stages
from hgc.ir.program import Program
from hgc.passes.sharding.even_stages import even_stages
from hgc.plan import Plan, Stage
from hgc.strategy import Strategy
from tests.families import FAMILIES

STEPS = 3
MakePlan = Callable[[Program], Plan]


def even(places: int, strategy: str = "dp1", schedule: str = "1f1b", micro_batches: int = 2, virtual: int = 1) -> MakePlan:
    """Stages of one strategy."""
    chosen = Strategy.parse(strategy)

    def make(program: Program) -> Plan:
        stages = even_stages(program, places, chosen, virtual, vee=schedule == "zbv")
        return Plan(chosen, stages=stages, schedule=schedule, micro_batches=micro_batches)

    return make


def unlike(*strategies: str, schedule: str = "1f1b", micro_batches: int = 2) -> MakePlan:
    """One stage for each strategy, on as many ranks as it has."""
    chosen = [Strategy.parse(text) for text in strategies]

    def make(program: Program) -> Plan:
        counts = [stage.blocks for stage in even_stages(program, len(chosen))]
        firsts = [sum(s.devices for s in chosen[:index]) for index in range(len(chosen))]
        stages = tuple(Stage(*entry) for entry in zip(counts, firsts, chosen, strict=True))
        return Plan(stages=stages, schedule=schedule, micro_batches=micro_batches)

    return make


def placed(*stages: tuple[int, int, str], schedule: str = "1f1b", micro_batches: int = 2) -> MakePlan:
    """Stages of any blocks on any ranks: number of blocks, first rank, strategy."""
    made = tuple(Stage(blocks, first, Strategy.parse(text)) for blocks, first, text in stages)
    return lambda program: Plan(stages=made, schedule=schedule, micro_batches=micro_batches)


@dataclass(frozen=True)
class Subject:
    """A model with its batch, traced, and what training it on one device gives."""

    program: Program
    cases: dict[torch.dtype, Case]
    expected: dict[torch.dtype, Outcome]
    truth: dict[str, Tensor]


@cache
def subject(family: str, rows: int = 4) -> Subject:
    torch.manual_seed(0)
    model, batch = FAMILIES[family]()
    repeats = -(-rows // 4)
    batch = {name: torch.cat([tensor.roll(i, -1) for i in range(repeats)])[:rows] for name, tensor in batch.items()}
    stored = reference.make(model, batch)
    cases = {dtype: make_case(stored, dtype, STEPS, seed=0) for dtype in (torch.float32, torch.float64)}
    expected = {dtype: reference.run(stored, case) for dtype, case in cases.items()}
    truth = reference.run(stored, first_step_in_float64(cases[torch.float32])).gradients
    return Subject(hgc.trace(model, batch), cases, expected, truth)


def emitted(program: Program, plan: Plan, folder: Path) -> tuple[Any, Any]:
    """``STAGES`` and ``PLAN`` of the saved program."""
    with torchrun.staged(folder) as staging:
        torchrun.write(staging, program, plan, distribute_stages(program, plan))
    return torchrun.load_model(folder)


def check_parity(given: Subject, make: MakePlan, folder: Path, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> None:
    """Loss, every gradient, and weights after three optimizer steps."""
    plan = make(given.program)
    stages, info = emitted(given.program, plan, folder)
    for dtype in dtypes:
        with without_dropout():
            outcomes = run_ranks(plan.devices, lambda rank, dtype=dtype: run_rank(stages, info, given.cases[dtype]))
        for found in (outcomes[0], outcomes[-1]):
            truth = given.truth if dtype == torch.float32 else None
            report = compare(given.expected[dtype], found, dtype, plan.devices, str(plan.schedule), truth)
            assert report.ok, f"{dtype}: {report}; worst at {[d.where for d in report.differences]}"

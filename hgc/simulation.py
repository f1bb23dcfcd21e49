"""The stages of a plan as the simulator takes them: cut, lowered, measured, what is alike once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hgc.backends.simulator import StageProgram
from hgc.backends.simulator.stages import received
from hgc.cost.symbolic import ProgramCosts
from hgc.ir.hashing import structure_hash
from hgc.ir.program import Program
from hgc.passes.analysis.costs import BlockCosts
from hgc.passes.sharding.stages import cut
from hgc.plan import Plan


def stage_programs(traced: Program, plan: Plan, lower: Callable[[Program, Plan], Program]) -> tuple[StageProgram, ...]:
    """Each stage of ``plan``, or the whole program of a plan without stages.

    ``lower(program, plan)`` applies a plan without stages to a single-device program. Raises what it raises, and
    :class:`~hgc.errors.PlanError` for stages that do not fit the program.
    """
    known: dict[tuple[str, str], tuple[Program, ProgramCosts]] = {}
    found = []
    for index, stage in enumerate(cut(traced, plan)):
        strategy = plan.strategies[index]
        key = structure_hash(stage), str(strategy)
        if key not in known:
            lowered = lower(stage, replace(plan, strategy=strategy, stages=(), program_hash=""))
            known[key] = lowered, BlockCosts().run(lowered)
        names = tuple(str(node.target) for node in received(stage))
        found.append(StageProgram(*known[key], names, stage.results))
    return tuple(found)

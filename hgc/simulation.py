"""The stages of a plan as the simulator takes them: cut, lowered, measured, what is alike once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from hgc.backends.simulator import StageProgram
from hgc.backends.simulator.stages import received
from hgc.cost.symbolic import ProgramCosts
from hgc.ir.hashing import structure_hash
from hgc.ir.program import Program
from hgc.passes.analysis.costs import BlockCosts
from hgc.passes.sharding.stages import cut
from hgc.plan import Plan


def stage_programs(
    traced: Program, plan: Plan, lower: Callable[[Program, Plan], Program], sizes: Mapping[str, float] | None = None
) -> tuple[StageProgram, ...]:
    """Each stage of ``plan``, or the whole program of a plan without stages.

    ``lower(program, plan)`` applies a plan without stages to a single-device program, as large as ``sizes`` (symbol name -> number;
    default: the example's) say. Raises what it raises, and :class:`~hgc.errors.PlanError` for stages that do not fit the program.
    """
    traced = _sized(traced, sizes or {})
    known: dict[tuple[str, str], tuple[Program, ProgramCosts]] = {}
    found = []
    for index, stage in enumerate(cut(traced, plan)):
        strategy = plan.strategies[index]
        key = structure_hash(stage), str(strategy)
        if key not in known:
            lowered = lower(stage, replace(plan, strategy=strategy, stages=(), program_hash=""))
            known[key] = lowered, BlockCosts(plan.precision).run(lowered)
        names = tuple(str(node.target) for node in received(stage))
        found.append(StageProgram(*known[key], names, stage.results))
    return tuple(found)


def _sized(traced: Program, sizes: Mapping[str, float]) -> Program:
    """The same program with other example sizes, which decide what divides."""
    sized = traced.copy()
    sized.symbols = {symbol: replace(found, hint=int(sizes.get(symbol.name, found.hint))) for symbol, found in traced.symbols.items()}
    return sized

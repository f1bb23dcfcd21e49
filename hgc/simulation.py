"""The stages of a plan as the simulator takes them: cut, lowered, measured, what is alike once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from hgc.backends.simulator import StageProgram
from hgc.backends.simulator.stages import received
from hgc.cost.execution import EAGER, Execution
from hgc.ir.hashing import structure_hash
from hgc.ir.program import Program
from hgc.passes.analysis.costs import BlockCosts
from hgc.passes.sharding.stages import cut, stage_plan
from hgc.plan import Plan
from hgc.strategy import Strategy


def stage_programs(
    traced: Program,
    plan: Plan,
    lower: Callable[[Program, Plan], Program],
    sizes: Mapping[str, float] | None = None,
    execution: Execution = EAGER,
    known: dict[tuple[str, str], StageProgram] | None = None,
) -> tuple[StageProgram, ...]:
    """Each stage of ``plan``, or the whole program of a plan without stages.

    ``lower(program, plan)`` applies a plan without stages to a single-device program, as large as ``sizes`` (symbol name -> number;
    default: the example's) say. ``known``: what calls with the same ``lower``, precision, ``sizes`` and ``execution`` share. Raises what
    ``lower`` raises, and :class:`~hgc.errors.PlanError` for stages that do not fit the program.
    """
    traced = sized(traced, sizes or {})
    known = {} if known is None else known
    stages = enumerate(cut(traced, plan))
    return tuple(_once(known, stage, stage_plan(plan, index), execution, lower) for index, stage in stages)


def measured(programs: Sequence[Program], plan: Plan, execution: Execution = EAGER) -> tuple[StageProgram, ...]:
    """The plan's stages, lowered already; those that do the same are measured once."""
    known: dict[tuple[str, str], StageProgram] = {}
    return tuple(
        _once(known, program, stage_plan(plan, index), execution, lambda lowered, _: lowered) for index, program in enumerate(programs)
    )


def _once(
    known: dict[tuple[str, str], StageProgram],
    stage: Program,
    plan: Plan,
    execution: Execution,
    lower: Callable[[Program, Plan], Program],
) -> StageProgram:
    """A stage, lowered and measured unless one that does the same was."""
    key = stage_key(stage, plan.strategy)
    if key not in known:
        lowered = lower(stage, plan)
        known[key] = StageProgram(lowered, BlockCosts(plan.precision, execution, plan.strategy.zero).run(lowered))
    return linked(known[key], stage)


def stage_key(stage: Program, strategy: Strategy) -> tuple[str, str]:
    """Equal for stages that are lowered and measured alike, whichever plans of one program they come from."""
    holders = [entry.stages for entry in stage.state.values() if entry.stages]  # stages by number: another plan may number them otherwise
    return structure_hash(stage), f"{strategy} {holders}" if holders else str(strategy)


def linked(found: StageProgram, stage: Program) -> StageProgram:
    """What was measured of a stage that does the same, under the names by which ``stage`` gets and hands on values."""
    return replace(found, received=tuple(str(node.target) for node in received(stage)), results=stage.results)


def sized(traced: Program, sizes: Mapping[str, float]) -> Program:
    """The same program with other example sizes (symbol name -> number), which decide what divides."""
    made = traced.copy()
    made.symbols = {symbol: replace(found, hint=int(sizes.get(symbol.name, found.hint))) for symbol, found in traced.symbols.items()}
    return made

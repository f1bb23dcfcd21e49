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
from hgc.passes.sharding.stages import cut
from hgc.plan import Plan


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
    traced = _sized(traced, sizes or {})
    known = {} if known is None else known
    found = []
    for index, stage in enumerate(cut(traced, plan)):
        strategy = plan.strategies[index]
        key = structure_hash(stage), str(strategy)
        if key not in known:
            lowered = lower(stage, replace(plan, strategy=strategy, stages=(), program_hash=""))
            known[key] = StageProgram(lowered, BlockCosts(plan.precision, execution, strategy.zero).run(lowered))
        found.append(_named(known[key], stage))
    return tuple(found)


def measured(programs: Sequence[Program], plan: Plan, execution: Execution = EAGER) -> tuple[StageProgram, ...]:
    """The plan's stages, lowered already; those that do the same are measured once."""
    known: dict[tuple[str, str], StageProgram] = {}
    found = []
    for program, strategy in zip(programs, plan.strategies, strict=True):
        key = structure_hash(program), str(strategy)
        if key not in known:
            known[key] = StageProgram(program, BlockCosts(plan.precision, execution, strategy.zero).run(program))
        found.append(_named(known[key], program))
    return tuple(found)


def _named(known: StageProgram, stage: Program) -> StageProgram:
    """The same with the names under which ``stage`` gets and hands on values."""
    return replace(known, received=tuple(str(node.target) for node in received(stage)), results=stage.results)


def _sized(traced: Program, sizes: Mapping[str, float]) -> Program:
    """The same program with other example sizes, which decide what divides."""
    sized = traced.copy()
    sized.symbols = {symbol: replace(found, hint=int(sizes.get(symbol.name, found.hint))) for symbol, found in traced.symbols.items()}
    return sized

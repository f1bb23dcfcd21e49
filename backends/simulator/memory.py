"""Memory of each stage in numbers: the terms of ``hgc.cost.memory``, with as many micro-batches as the schedule has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

from hgc.backends.simulator.result import StageMemory
from hgc.backends.simulator.stages import Sizes, StageProgram, number
from hgc.cost.memory import Memory, memory
from hgc.plan import Plan

PASSING = ("logits", "workspace")
"""Terms that are not needed at the same time."""


def stage_memory(
    stages: Sequence[StageProgram], plan: Plan, sizes: Sizes, in_flight: Sequence[int], optimizer: str
) -> tuple[StageMemory, ...]:
    """``sizes`` are those of the whole batch, ``in_flight`` the micro-batches that a stage has saved activations of."""
    known: dict[tuple[int, str, int], tuple[tuple[tuple[str, float], ...], float]] = {}
    found = []
    for index, stage in enumerate(stages):
        key = id(stage.costs), str(plan.strategies[index]), in_flight[index]
        if key not in known:
            own = replace(plan, strategy=plan.strategies[index], stages=())
            known[key] = _numbers(memory(stage.program, own, stage.costs, optimizer, plan.micro_batches), sizes, in_flight[index])
        found.append(StageMemory(index, tuple(plan.ranks(index)), *known[key]))
    return tuple(found)


def _numbers(terms: Memory, sizes: Sizes, in_flight: int) -> tuple[tuple[tuple[str, float], ...], float]:
    amounts = {field.name: number(getattr(terms, field.name), sizes) for field in fields(terms)}
    amounts["activations"] *= in_flight
    passing = max(amounts[name] for name in PASSING)
    return tuple(amounts.items()), passing + sum(amount for name, amount in amounts.items() if name not in PASSING)

"""Memory of each stage in numbers: the terms of ``hgc.cost.memory``, with as many micro-batches as the schedule has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from itertools import accumulate

from hgc.backends.simulator.result import StageMemory
from hgc.backends.simulator.stages import Sizes, StageProgram, number
from hgc.cluster import Cluster
from hgc.cost.execution import Execution
from hgc.cost.memory import Memory, Reserve, memory, reserve_of
from hgc.cost.places import slowest_device
from hgc.plan import Plan
from hgc.schedule import Schedule


def stage_memory(
    stages: Sequence[StageProgram],
    plan: Plan,
    cluster: Cluster,
    sizes: Sizes,
    in_flight: Sequence[int],
    optimizer: str,
    execution: Execution,
) -> tuple[StageMemory, ...]:
    """``sizes`` are those of the whole batch, ``in_flight`` the micro-batches that a stage has saved activations of."""
    known: dict[tuple[int, str, int, Reserve], tuple[tuple[tuple[str, float], ...], float]] = {}
    found = []
    for index, (stage, strategy) in enumerate(zip(stages, plan.strategies, strict=True)):
        reserve = reserve_of(slowest_device(cluster, plan.ranks(index)))
        key = id(stage.costs), str(strategy), in_flight[index], reserve
        if key not in known:
            terms = memory(
                stage.program,
                plan,
                stage.costs,
                "sgd" if optimizer == "none" else optimizer,
                plan.micro_batches,
                in_flight=in_flight[index],
                strategy=strategy,
                execution=execution,
                reserve=reserve,
            )
            known[key] = _numbers(terms, sizes)
        found.append(StageMemory(index, tuple(plan.ranks(index)), *known[key]))
    return tuple(found)


def _numbers(terms: Memory, sizes: Sizes) -> tuple[tuple[tuple[str, float], ...], float]:
    amounts = tuple((field.name, number(getattr(terms, field.name), sizes)) for field in fields(terms))
    return amounts, number(terms.total, sizes)


def peak_bytes(stages: Sequence[StageMemory], schedule: Schedule, in_flight: Sequence[int]) -> float:
    """Of the fullest rank, which holds the state of all its stages.

    Activations are added up as they come and go in its list; what only the running block needs, and what the driver takes, counts once.
    """
    peaks = []
    for ranks in schedule.groups:
        actions = schedule.lists[ranks[0]]
        mine = {action.stage for action in actions}
        kept = sum(stages[stage].term(*_LASTING) for stage in mine)
        passing = max(stages[stage].total - stages[stage].term(*_LASTING, "activations", "reserve") for stage in mine)
        saved = {stage: stages[stage].term("activations") / in_flight[stage] for stage in mine}
        changes = (saved[action.stage] * _ALIVE.get(action.kind, 0) for action in actions)
        peaks.append(kept + passing + max(accumulate(changes)) + max(stages[stage].term("reserve") for stage in mine))
    return max(peaks)


_LASTING = ("parameters", "master", "buffers", "gradients", "optimizer", "batch", "gathered")
_ALIVE = {"F": 1, "B": -1, "W": -1}

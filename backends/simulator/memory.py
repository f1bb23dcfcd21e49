"""Memory of each stage in numbers: the terms of ``hgc.cost.memory``, with as many micro-batches as the schedule has in flight."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from hgc.backends.simulator.result import DeviceMemory, StageMemory
from hgc.backends.simulator.stages import Sizes, StageProgram, number
from hgc.backends.simulator.state_steps import NONE
from hgc.cluster import Cluster
from hgc.cost.execution import Execution
from hgc.cost.memory import Reserve, memory, reserve_of
from hgc.cost.places import slowest_device
from hgc.plan import Plan
from hgc.schedule import Schedule
from hgc.strategy import Strategy


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
    known: dict[tuple[int, str, Reserve], tuple[_Terms, _Terms]] = {}
    found = []
    for index, (stage, strategy) in enumerate(zip(stages, plan.strategies, strict=True)):
        reserve = reserve_of(slowest_device(cluster, plan.ranks(index)))
        key = id(stage.costs), str(strategy), reserve
        if key not in known:
            terms_for = partial(_terms, stage, plan, strategy, optimizer, execution, reserve, sizes)
            known[key] = terms_for(1), terms_for(2)
        one, two = known[key]
        amounts = {name: one[name] + (in_flight[index] - 1) * (two[name] - one[name]) for name in one}  # every term is linear in it
        total = amounts.pop("total")
        found.append(StageMemory(index, tuple(plan.ranks(index)), tuple(amounts.items()), total))
    return tuple(found)


_Terms = dict[str, float]
"""Names of ``hgc.cost.memory.Memory``, and ``total``."""


def _terms(
    stage: StageProgram,
    plan: Plan,
    strategy: Strategy,
    optimizer: str,
    execution: Execution,
    reserve: Reserve,
    sizes: Sizes,
    in_flight: int,
) -> _Terms:
    terms = memory(
        stage.program,
        plan,
        stage.costs,
        "sgd" if optimizer == NONE else optimizer,
        plan.micro_batches,
        in_flight=in_flight,
        strategy=strategy,
        execution=execution,
        reserve=reserve,
    )
    return {name: number(expression, sizes) for name, expression in terms.expressions().items()}


def device_memory(
    stages: Sequence[StageMemory], schedule: Schedule, in_flight: Sequence[int], fragmentation: float = 0.0
) -> tuple[DeviceMemory, ...]:
    """Each set of ranks that are alike. A rank has the state of all its stages, and activations as they come and go in its list; what only
    the running block needs, and what the driver takes, counts once. ``fragmentation``: as ``Execution`` has it."""
    found = []
    for ranks in schedule.groups:
        actions = [action for action in schedule.lists[ranks[0]] if action.is_compute]
        mine = [stages[stage] for stage in sorted({action.stage for action in actions})]
        saved = {stage.stage: stage.term(ACTIVATIONS) / in_flight[stage.stage] for stage in mine}
        alive = max(accumulate(saved[action.stage] * _ALIVE.get(action.kind, 0) for action in actions))
        busiest = max(mine, key=lambda stage: stage.total - stage.term(*_LASTING, ACTIVATIONS, RESERVE))
        terms = {name: sum(stage.term(name) for stage in mine) if name in _LASTING else busiest.term(name) for name, _ in busiest.terms}
        tensors = sum((alive, *(terms[name] for name in _LASTING), busiest.total - busiest.term(*_LASTING, ACTIVATIONS, RESERVE)))
        driver = max(stage.term(RESERVE) - fragmentation * (stage.total - stage.term(RESERVE)) for stage in mine)
        terms |= {ACTIVATIONS: alive, RESERVE: driver + fragmentation * tensors}
        total = tensors + terms[RESERVE]
        found.append(DeviceMemory(ranks, tuple(stage.stage for stage in mine), tuple(terms.items()), total))
    return tuple(found)


ACTIVATIONS, RESERVE = "activations", "reserve"
_LASTING = ("parameters", "master", "buffers", "gradients", "optimizer", "batch", "gathered")
_ALIVE = {"F": 1, "B": -1, "W": -1}

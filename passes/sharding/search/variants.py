"""Plans from what the search has found: stages, parts that take turns, and plans that differ from one in one decision."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from hgc.passes.sharding.search.hybrid import Found
from hgc.plan import Plan, Precision, Stage
from hgc.strategy import RECOMPUTE, ZERO_STAGES, Strategy


def plan_of(found: Found, strategies: Sequence[Strategy], precision: Precision) -> Plan:
    """Neighbours with one strategy are one stage; those of one pipeline stage share their ranks. Parts that take turns are interleaved."""
    if found.problem.virtual > 1:
        return _interleaved(found, strategies, precision)
    ranks = strategies[0].devices
    stages = tuple(
        Stage(len(list(run)), place * ranks, strategies[choice])
        for place, stage in enumerate(found.plan.stages)
        for choice, run in groupby(stage.choices)
    )
    first = stages[0].strategy or Strategy()
    made = Plan(first, micro_batches=found.problem.micro_batches, precision=precision)
    return replace(made, stages=stages, schedule="1f1b") if len(stages) > 1 else made


def _interleaved(found: Found, strategies: Sequence[Strategy], precision: Precision) -> Plan:
    """As many parts as the problem has, or as the smallest stage has blocks. Of each stage the first block's strategy counts for all."""
    places, ranks = found.plan.stages, strategies[0].devices
    parts = min(found.problem.virtual, *found.plan.cuts)
    chosen = [strategies[stage.choices[0]] for stage in places]
    sizes = [shared_out(blocks, parts, last=place == len(places) - 1) for place, blocks in enumerate(found.plan.cuts)]
    turns = [(turn, place) for turn in range(parts) for place in range(len(places))]
    stages = tuple(Stage(sizes[place][turn], place * ranks, chosen[place]) for turn, place in turns)
    schedule = "interleaved" if parts > 1 else "1f1b"
    return Plan(chosen[0], stages, schedule, found.problem.micro_batches, precision)


def shared_out(blocks: int, parts: int, *, last: bool) -> tuple[int, ...]:
    """Blocks of a stage as parts of equal size; what is left over goes to the first ones, in the last stage to the last ones: the ends of
    a program are blocks of another kind (embedding, loss), which make parts longer."""
    each, more = divmod(blocks, parts)
    sizes = tuple(each + (part < more) for part in range(parts))
    return sizes[::-1] if last else sizes


def neighbours(plan: Plan) -> Iterator[Plan]:
    """Plans that differ in one decision that leaves graphs and cuts as they are: ZeRO, recomputation, twice or half the micro-batches."""
    for zero in ZERO_STAGES:
        yield _with(plan, zero=zero)
    for recompute in RECOMPUTE:
        yield _with(plan, recompute=recompute)
    yield replace(plan, micro_batches=2 * plan.micro_batches)
    if plan.micro_batches % 2 == 0:
        yield replace(plan, micro_batches=plan.micro_batches // 2)


def _with(plan: Plan, **changes: int | str) -> Plan:
    def changed(strategy: Strategy) -> Strategy:
        shared = strategy.dp * strategy.cp * strategy.sp > 1
        made = replace(strategy, **changes)  # type: ignore[arg-type]
        return made if shared else replace(made, zero=0)

    stages = tuple(replace(stage, strategy=changed(stage.strategy) if stage.strategy else None) for stage in plan.stages)
    return replace(plan, strategy=changed(plan.strategy), stages=stages)

"""The planner behind ``plan="auto"``: search by numbers, then the simulator decides among the best."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from hgc.cluster import Cluster
from hgc.cost.execution import EAGER, Execution
from hgc.errors import HgcError, PlanError
from hgc.ir.program import Program
from hgc.passes.base import Planner
from hgc.passes.sharding.limits import batch_statistics
from hgc.passes.sharding.search.costs import Measure, ProgramBlocks
from hgc.passes.sharding.search.hybrid import Found, Outcome, search
from hgc.passes.sharding.search.judged import Judge, Judged, Late, Searched, in_words, places_of
from hgc.passes.sharding.search.partition import balance
from hgc.passes.sharding.search.pins import Pinned, Pins
from hgc.passes.sharding.search.pipeline import Pipeline, alike, mixed
from hgc.passes.sharding.search.remedies import nothing_fits, remedies
from hgc.passes.sharding.search.space import space
from hgc.passes.sharding.search.variants import neighbours, plan_of
from hgc.plan import Plan, Precision
from hgc.strategy import Strategy

PLAIN_SCHEDULES = ("gpipe", "1f1b", "zb-h1")
"""Orders of stages that are one part each."""
MARGIN = 0.25
"""Plans that the numbers have so much slower than the best are still shown to the judge."""
SHOWN = 6
"""Plans with one strategy for each stage that the judge sees at most, each with its own mesh, number of stages and parts."""
REFINED = 2
"""Rounds in which the judge sees what differs from the best plan in one decision."""
_VIRTUAL = (2, 4)
"""Parts of a stage that take turns, beside one and as many as there are blocks for."""
_NONE, _AS_NEEDED, _AT_WILL = range(3)
"""How large groups that share a sequence may be."""
_LONGEST_SEQUENCE_GROUP = 4
"""Ranks that share a sequence, in multiples of what the batch has too few rows for."""
_GROWTH = 1.1
_AS_FAST = 0.005
"""No prediction tells apart steps that differ by so little."""
_ROUNDS = 6
"""Searches, each with less memory, until the simulator agrees that a plan fits."""


@dataclass(frozen=True)
class SearchPlanner(Planner):
    """Pipeline stages x micro-batches x a strategy for each block.

    Neighbours with one strategy become a stage of the plan; those of one pipeline stage share their ranks.

    Args:
        measure: applies a plan without stages, as ``hgc.compiler.distribute`` does, and finds what the result costs.
        judge: predicts the plans that the search likes best.
        space: ``"hgc"`` or ``"galvatron-bmw"``.
        fix, forbid: parts of the plan (:data:`~hgc.passes.sharding.search.pins.PARTS`), ``fix={"tp": 2, "zero": [0, 3]}``.
        schedules: for the judge to try where there are stages; ``"interleaved"`` has the search look at parts that take turns.
        precision: of the plan. ``execution``: how it runs, as the judge has it.
        shown, refined: how many plans the judge sees for each space, and in how many rounds neighbours of the best.
        also: plans that the judge compares with those that are found.
        time_limit_s: after it nothing new is begun once there is a plan; notes say what was left out. ``clock``: seconds that only grow.

    Sequence axes (``cp``, ``sp``) are searched where the batch has fewer rows than the cluster devices and a stage's ranks cannot be dealt
    equally many, or nothing fits without: whole rows are the same work and need no exchange. All stages have as many devices.
    """

    name: ClassVar[str] = "search"

    measure: Measure
    judge: Judge
    space: str = "hgc"
    fix: Pinned = ()
    forbid: Pinned = ()
    schedules: tuple[str, ...] = ("1f1b", "zb-h1", "interleaved")
    precision: Precision = field(default_factory=Precision)
    execution: Execution = EAGER
    also: tuple[Plan, ...] = ()
    shown: int = SHOWN
    refined: int = REFINED
    time_limit_s: float | None = None
    clock: Callable[[], float] = time.monotonic

    @cached_property
    def pins(self) -> Pins:
        """Raises :class:`~hgc.errors.PlanError` for pins that no plan could have."""
        return Pins.of(self.fix, self.forbid)

    def run(self, program: Program, cluster: Cluster) -> Plan:
        """Raises :class:`~hgc.errors.PlanError` if no plan can be, naming the pins that are in the way, or none fits, naming what would."""
        return self.search(ProgramBlocks(program, cluster, self.measure, self.precision, self.execution)).plan

    def search(self, blocks: ProgramBlocks) -> Searched:
        """The same with all that was found; searches of one program on several clusters may share its blocks. Raises as :meth:`run`."""
        program, cluster = blocks.program, blocks.cluster
        self.pins.check(cluster.devices, len(blocks.kinds), blocks.batch)
        began_s, limit_s = self.clock(), math.inf if self.time_limit_s is None else self.time_limit_s
        late = Late(lambda: self.clock() - began_s >= limit_s)
        asked = any(name in ("cp", "sp") for name in self.pins.names())
        shared = _AT_WILL if asked else _AS_NEEDED if blocks.batch < cluster.devices else _NONE
        tried = self._problems(blocks, shared, late)
        if shared != _AT_WILL and not _searched([problem for problem, _ in tried], late, self.shown).found:
            tried = self._problems(blocks, _AT_WILL, late)
        share = 1.0
        for _ in range(_ROUNDS):
            outcome = _searched([replace(problem, limit=problem.limit * share) for problem, _ in tried], late, self.shown)
            if not outcome.found:
                break
            judged = self._judged(program, cluster, outcome, [strategies for _, strategies in tried], late)
            fitting = [each for each in judged if each.fits]
            if fitting:
                best = _simplest(fitting)
                notes = (*self._notes(outcome, len(judged), late), *_runner_up(best, fitting))
                return Searched(best, tuple(judged), outcome, share, late.unmeasured, notes)
            share *= min(0.95, 1 / min(each.fullness for each in judged))
        raise PlanError(self._why_nothing(blocks, [problem for problem, _ in tried], share))

    # -- problems -----------------------------------------------------------------------------------------------------------------------

    def _problems(self, blocks: ProgramBlocks, sequence: int, late: Late) -> list[tuple[Pipeline, tuple[Strategy, ...]]]:
        found: list[tuple[Pipeline, tuple[Strategy, ...]]] = []
        for stages, strategies, micro_batches in self._spaces(blocks, sequence):
            chosen = late.usable(blocks, strategies, begin=not found)
            if not chosen:
                continue
            for count in micro_batches:
                for virtual in self._virtual(len(blocks.kinds), stages, count):
                    found.append((blocks.pipeline(chosen, stages, count, virtual), chosen))
        return found

    def _spaces(self, blocks: ProgramBlocks, sequence: int) -> Iterator[tuple[int, tuple[Strategy, ...], tuple[int, ...]]]:
        """Numbers of stages with the strategies and the micro-batches that they may have, none of them without any."""
        devices, per_node = blocks.cluster.devices, min(node.count for node in blocks.cluster.nodes)
        for stages in (count for count in range(1, devices + 1) if devices % count == 0 and count <= len(blocks.kinds)):
            if not self.pins.allows("pp", stages):
                continue
            strategies = space(self.space, devices // stages, most_tp=per_node)
            strategies = tuple(s for s in strategies if _shares_sequence(s, blocks.batch) <= sequence and min(s.cp, s.sp) == 1)
            strategies = self._preferred([strategy for strategy in strategies if self.pins.allow(strategy)])
            micro_batches = tuple(self._micro_batches(1 if batch_statistics(blocks.program) else blocks.batch, stages))
            if strategies and micro_batches:
                yield stages, strategies, micro_batches

    def _virtual(self, blocks: int, stages: int, micro_batches: int) -> tuple[int, ...]:
        """Interleaving needs stages, and micro-batches that they share out evenly."""
        asked = "interleaved" in self.schedules and self.pins.allows("schedule", "interleaved")
        if stages == 1 or micro_batches % stages or not asked:
            return (1,)
        most = blocks // stages
        return (1, *sorted({parts for parts in (*_VIRTUAL, most) if 1 < parts <= most}))

    def _preferred(self, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """With Megatron-LM's sequence parallelism, which moves as much and keeps less, unless the user says otherwise."""
        asked = "sequence_parallel" in self.pins.names()
        return tuple(strategy for strategy in strategies if asked or strategy.sequence_parallel)

    def _micro_batches(self, batch: int, stages: int) -> Iterator[int]:
        for count in range(1, batch + 1):
            if batch % count == 0 and (count >= stages or stages == 1) and self.pins.allows("micro_batches", count):
                yield count

    # -- judging ------------------------------------------------------------------------------------------------------------------------

    def _judged(
        self, program: Program, cluster: Cluster, outcome: Outcome, strategies: Sequence[tuple[Strategy, ...]], late: Late
    ) -> list[Judged]:
        judged, refused = list[Judged](), []
        made = [plan_of(found, strategies[found.index], self.precision) for found in outcome.found]
        for variant in dict.fromkeys((*(each for plan in made for each in self._scheduled(plan)), *self.also)):
            if late() and any(each.fits for each in judged):
                break
            try:
                judged.append(Judged.of(variant, self.judge(program, variant, cluster)))
            except HgcError as error:
                refused.append(f"{in_words(variant)}: {error}")
        if not judged:
            raise PlanError(f"no plan that was found for {program.name} can be lowered ({refused[0]}); write a plan by hand")
        return judged + self._refined(program, cluster, judged, late)

    def _scheduled(self, plan: Plan) -> Iterator[Plan]:
        """Stages that all share their ranks leave nothing to order."""
        if not plan.stages or plan.schedule == "interleaved":
            yield plan
            return
        known = PLAIN_SCHEDULES if any(name == "schedule" for name, _ in self.pins.fix) else self.schedules
        allowed = [each for each in known if each in PLAIN_SCHEDULES and self.pins.allows("schedule", each)]
        for schedule in allowed[:1] if places_of(plan) == 1 else allowed:
            yield replace(plan, schedule=schedule)

    def _refined(self, program: Program, cluster: Cluster, judged: Sequence[Judged], late: Late) -> list[Judged]:
        """Neighbours of the best plan that fits, and theirs as long as they are better."""
        seen, found = {each.plan for each in judged}, list[Judged]()
        for _ in range(self.refined):
            fitting = [each for each in (*judged, *found) if each.fits]
            if not fitting or late():
                break
            best = min(fitting, key=lambda each: each.step_s)
            new = [plan for plan in neighbours(best.plan) if plan not in seen and self._has_room_for(program, plan)]
            seen.update(new)
            tried = list[Judged]()
            for plan in new:
                with suppress(HgcError):  # a neighbour is an offer: what cannot be is not taken
                    tried += [Judged.of(plan, self.judge(program, plan, cluster))] if not late() else []
            found += tried
            if not any(each.step_s < best.step_s and each.fits for each in tried):
                break
        return found

    def _has_room_for(self, program: Program, plan: Plan) -> bool:
        """Do the batch and the pins allow it?"""
        batches = [symbol.hint for symbol in program.symbols.values() if symbol.meaning == "batch"]
        divides = all(batch % (strategy.dp * plan.micro_batches) == 0 for batch in batches for strategy in plan.strategies)
        turns = plan.schedule != "interleaved" or plan.micro_batches % places_of(plan) == 0
        pinned = all(map(self.pins.allow, plan.strategies))
        return divides and turns and pinned and self.pins.allows("micro_batches", plan.micro_batches)

    # -- words --------------------------------------------------------------------------------------------------------------------------

    def _notes(self, outcome: Outcome, judged: int, late: Late) -> Iterator[str]:
        best = outcome.found[0]
        total = outcome.searched + outcome.left_out
        yield (
            f"searched {total} combinations of stages and micro-batches in the space {self.space!r}, {outcome.left_out} of them by bounds "
            f"alone, and simulated {judged} plan{'s' * (judged > 1)}"
        )
        if late():
            left = f": {late.unmeasured} strategies were not measured, and the bound holds for the others" if late.unmeasured else ""
            yield f"the time limit of {self.time_limit_s:g} s ended the search{left}"
        yield f"by the search's own costs the best is at most {outcome.gap:.1%} slower than any other with a strategy for each block"
        if best.problem.stages > 1:
            degrees = balance(best.plan, best.problem)
            most = 1 - 1 / best.problem.stages
            yield f"balance degrees of its stages: time {degrees.time:.3f}, memory {degrees.memory:.3f}, at most {most:.3f}"

    def _why_nothing(self, blocks: ProgramBlocks, problems: Sequence[Pipeline], share: float) -> str:
        name, cluster, pins = blocks.program.name, blocks.cluster, f" with {self.pins}" if self.pins else ""
        if not problems:
            return f"no plan{pins} runs {name} on {cluster.devices} devices in the space {self.space!r}: {self._what_refuses(blocks)}"
        found = remedies(blocks.program, cluster, share, lambda program, other: self._known_problems(blocks.elsewhere(program, other)))
        return nothing_fits(f"no plan{pins} fits {name}", found, blocks)

    def _known_problems(self, blocks: ProgramBlocks) -> list[Pipeline]:
        """Of strategies whose graphs were lowered before."""
        known = Late(lambda: True)
        return [problem for problem, _ in self._problems(blocks, _AT_WILL, known)]

    def _what_refuses(self, blocks: ProgramBlocks) -> str:
        """The pins without which there would be strategies, or what the model, the batch and the space refuse."""
        blamed = [words for words, pins in self.pins.without_one() if self._has_strategies(blocks, pins)]
        if blamed and not self._has_strategies(blocks, self.pins):
            return f"drop {' or '.join(blamed)}"
        reason = next(iter(blocks.refused.values()), f"the batch has {blocks.batch} rows")
        return f"{reason}; drop {self.pins}" if self.pins else reason

    def _has_strategies(self, blocks: ProgramBlocks, pins: Pins) -> bool:
        return bool(list(replace(self, fix=pins.fix, forbid=pins.forbid)._spaces(blocks, _AT_WILL)))


def _searched(problems: Sequence[Pipeline], late: Late, shown: int) -> Outcome:
    """The best plans with one strategy for each stage, and the best with one for each block where that is another.

    Bounds hold for both where stages are not interleaved: parts that take turns have one strategy for each stage.
    """
    plain = [index for index, problem in enumerate(problems) if problem.virtual == 1]
    same = search(problems, alike, margin=MARGIN, is_late=late)
    enough_s = same.found[0].plan.step_s * (1 - _AS_FAST) if same.found else math.inf
    differing = search([problems[index] for index in plain], mixed, is_late=late, below_s=enough_s)
    best = [replace(found, index=plain[found.index]) for found in differing.found[:1]]
    others = [found for found in best if any(len(set(stage.choices)) > 1 for stage in found.plan.stages)]
    found = sorted((*_unlike(same.found, shown), *others), key=lambda each: each.plan.step_s)
    bound_s = min(differing.lower_bound_s, same.lower_bound_s)
    searched = same.searched + differing.searched
    return Outcome(tuple(found), bound_s, searched, same.left_out + differing.left_out, same.solved + differing.solved)


def _unlike(found: Sequence[Found], shown: int) -> list[Found]:
    """The best of each number of stages, of parts, and choice of each stage, in order of time."""
    kept: dict[tuple[int, bool, tuple[int, ...]], Found] = {}
    for each in found:
        first = tuple(stage.choices[0] for stage in each.plan.stages)
        kept.setdefault((each.problem.stages, each.problem.virtual > 1, first), each)
    return list(kept.values())[:shown]


def _shares_sequence(strategy: Strategy, batch: int) -> int:
    """How much the ranks of a stage share sequences: not, about as much as the batch has too few rows to give all equally many, more."""
    group, ranks = strategy.cp * strategy.sp, strategy.devices // strategy.tp
    needed = batch % ranks != 0 and group <= _LONGEST_SEQUENCE_GROUP * max(ranks / batch, 1)
    return _NONE if group == 1 else _AS_NEEDED if needed else _AT_WILL


def _simplest(judged: Sequence[Judged]) -> Judged:
    """Of those about as fast as the fastest the one with the fewest stages."""
    near = min(each.step_s for each in judged) * (1 + _AS_FAST)
    return min((each for each in judged if each.step_s <= near), key=lambda each: (len(each.plan.stages), each.step_s))


def _runner_up(best: Judged, judged: Sequence[Judged]) -> Iterator[str]:
    others = sorted((each for each in judged if each is not best), key=lambda each: each.step_s)
    if others and best.step_s:
        yield f"runner-up: {in_words(others[0].plan)}, {others[0].step_s / best.step_s:.3g} times as long"

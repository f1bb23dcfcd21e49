"""The planner behind ``plan="auto"``: search by numbers, then the simulator decides among the best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import ClassVar

from hgc.cluster import Cluster
from hgc.errors import HgcError, PlanError
from hgc.ir.program import Program
from hgc.passes.base import Planner
from hgc.passes.sharding.search.costs import Measure, ProgramBlocks
from hgc.passes.sharding.search.hybrid import Found, Outcome, search
from hgc.passes.sharding.search.partition import balance
from hgc.passes.sharding.search.pipeline import Pipeline, alike, mixed
from hgc.passes.sharding.search.space import narrowed, space
from hgc.plan import Plan, Precision, Prediction, Stage
from hgc.strategy import Strategy

Judge = Callable[[Program, Plan, Cluster], Prediction]
"""Predicts a step of a traced program under a plan; raises :class:`~hgc.errors.HgcError` for a plan that cannot be."""
MARGIN = 0.25
"""Plans that the numbers have so much slower than the best are still shown to the judge."""
SHOWN = 4
"""Plans that the judge sees at most."""
_MOST_MICRO_BATCHES = 64
_GROWTH = 1.1
_AS_FAST = 0.005
"""No prediction tells apart steps that differ by so little."""
_ROUNDS = 6
"""Searches, each with less memory, until the simulator agrees that a plan fits."""


@dataclass(frozen=True)
class Judged:
    """A plan with the judge's prediction."""

    plan: Plan
    predicted: Prediction

    @property
    def step_s(self) -> float:
        return self.predicted.step_s or 0.0

    @property
    def memory_bytes(self) -> int:
        return self.predicted.memory_bytes or 0


@dataclass(frozen=True)
class SearchPlanner(Planner):
    """Pipeline stages x micro-batches x a strategy for each block.

    Neighbours with one strategy become a stage of the plan; those of one pipeline stage share their ranks.

    Args:
        measure: applies a plan without stages, as ``hgc.compiler.distribute`` does, and finds what the result costs.
        judge: predicts the plans that the search likes best.
        space: ``"hgc"`` or ``"galvatron-bmw"``.
        fix, forbid: parts of all strategies, ``fix=(("tp", 2),)``, ``forbid=(("zero", 3),)``; ``stages`` and ``micro_batches`` too.
        schedules: for the judge to try where there are stages.
        precision: of the plan.

    Sequence axes (``cp``, ``sp``) are searched if the batch has fewer rows than the cluster devices, or nothing fits without: where rows
    suffice, giving a rank whole rows costs the same work and no exchange. All stages have as many devices.
    """

    name: ClassVar[str] = "search"

    measure: Measure
    judge: Judge
    space: str = "hgc"
    fix: tuple[tuple[str, object], ...] = ()
    forbid: tuple[tuple[str, object], ...] = ()
    schedules: tuple[str, ...] = ("1f1b", "zb-h1")
    precision: Precision = field(default_factory=Precision)

    def run(self, program: Program, cluster: Cluster) -> Plan:
        """Raises :class:`~hgc.errors.PlanError` if no plan can be, or none fits, naming the memory that would do."""
        blocks = ProgramBlocks(program, cluster, self.measure, self.precision)
        with_sequence = blocks.batch < cluster.devices or any(name in ("cp", "sp") for name, _ in self.fix)
        tried = self._problems(blocks, with_sequence)
        if not with_sequence and not _searched([problem for problem, _ in tried]).found:
            tried = self._problems(blocks, True)
        limit = blocks.limit_bytes
        for _ in range(_ROUNDS):
            outcome = _searched([replace(problem, limit=limit) for problem, _ in tried])
            if not outcome.found:
                break
            judged = self._judged(program, cluster, outcome, [strategies for _, strategies in tried])
            fitting = [each for each in judged if each.memory_bytes <= _memory_bytes(cluster)]
            if fitting:
                best = _simplest(fitting)
                notes = (*self._notes(outcome, len(judged)), *_runner_up(best, fitting))
                return replace(best.plan, predicted=best.predicted, notes=notes)
            limit *= min(0.95, _memory_bytes(cluster) / min(each.memory_bytes for each in judged))
        raise PlanError(self._why_nothing(blocks, [problem for problem, _ in tried], limit))

    # -- problems -----------------------------------------------------------------------------------------------------------------------

    def _problems(self, blocks: ProgramBlocks, with_sequence: bool) -> list[tuple[Pipeline, tuple[Strategy, ...]]]:
        devices, found = blocks.cluster.devices, []
        per_node = min(node.count for node in blocks.cluster.nodes)
        for stages in (count for count in range(1, devices + 1) if devices % count == 0 and count <= len(blocks.kinds)):
            if not self._allows("stages", stages):
                continue
            strategies = space(self.space, devices // stages, most_tp=per_node)
            strategies = tuple(s for s in strategies if (with_sequence or s.cp == s.sp == 1) and min(s.cp, s.sp) == 1)
            chosen = blocks.usable(self._preferred(self._narrowed(strategies)))
            if not chosen:
                continue
            for micro_batches in self._micro_batches(blocks.batch, stages):
                found.append((blocks.pipeline(chosen, stages, micro_batches), chosen))
        return found

    def _narrowed(self, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
        own = {name: value for name, value in self.fix if name not in _OUTER}
        never: dict[str, list[object]] = {}
        for name, value in self.forbid:
            if name not in _OUTER:
                never.setdefault(name, []).append(value)
        return narrowed(strategies, own, never)

    def _preferred(self, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """With Megatron-LM's sequence parallelism, which moves as much and keeps less, unless the user says otherwise."""
        asked = any(name == "sequence_parallel" for name, _ in (*self.fix, *self.forbid))
        return tuple(strategy for strategy in strategies if asked or strategy.sequence_parallel)

    def _micro_batches(self, batch: int, stages: int) -> Iterator[int]:
        for count in range(1, min(batch, _MOST_MICRO_BATCHES) + 1):
            if batch % count == 0 and (count >= stages or stages == 1) and self._allows("micro_batches", count):
                yield count

    def _allows(self, name: str, value: int) -> bool:
        fixed = dict(self.fix).get(name, value)
        return fixed == value and (name, value) not in self.forbid

    # -- judging ------------------------------------------------------------------------------------------------------------------------

    def _judged(self, program: Program, cluster: Cluster, outcome: Outcome, strategies: Sequence[tuple[Strategy, ...]]) -> list[Judged]:
        judged, refused = [], []
        for found in outcome.found:
            plan = self._plan(found, strategies[found.index])
            for schedule in self.schedules if plan.stages else (plan.schedule,):
                variant = replace(plan, schedule=schedule)
                try:
                    judged.append(Judged(variant, self.judge(program, variant, cluster)))
                except HgcError as error:
                    refused.append(f"{_words(variant)}: {error}")
        if not judged:
            raise PlanError(f"no plan that was found for {program.name} can be lowered ({refused[0]}); write a plan by hand")
        return judged

    def _plan(self, found: Found, strategies: Sequence[Strategy]) -> Plan:
        ranks = strategies[0].devices
        stages = tuple(
            Stage(len(list(run)), place * ranks, strategies[choice])
            for place, stage in enumerate(found.plan.stages)
            for choice, run in groupby(stage.choices)
        )
        first = stages[0].strategy or Strategy()
        made = Plan(first, micro_batches=found.problem.micro_batches, precision=self.precision)
        return replace(made, stages=stages, schedule="1f1b") if len(stages) > 1 else made

    # -- words --------------------------------------------------------------------------------------------------------------------------

    def _notes(self, outcome: Outcome, judged: int) -> Iterator[str]:
        best = outcome.found[0]
        total = outcome.searched + outcome.left_out
        yield (
            f"searched {total} combinations of stages and micro-batches in the space {self.space!r}, {outcome.left_out} of them by bounds "
            f"alone, and simulated {judged} plan{'s' * (judged > 1)}"
        )
        yield f"by the search's own costs the best is at most {outcome.gap:.1%} slower than any other with a strategy for each block"
        if best.problem.stages > 1:
            degrees = balance(best.plan, best.problem)
            most = 1 - 1 / best.problem.stages
            yield f"balance degrees of its stages: time {degrees.time:.3f}, memory {degrees.memory:.3f}, at most {most:.3f}"

    def _why_nothing(self, blocks: ProgramBlocks, problems: Sequence[Pipeline], limit: float) -> str:
        """``limit``: of the numbers, for what the simulator would have fit; the memory that would do is larger by as much."""
        devices = blocks.cluster.devices
        if not problems:
            reason = next(iter(blocks.refused.values()), f"the batch has {blocks.batch} rows")
            pins = "; drop what fix and forbid say" if self.fix or self.forbid else ""
            return f"no strategy runs {blocks.program.name} on {devices} devices in the space {self.space!r} ({reason}){pins}"
        enough = max(limit, 1.0)
        while not _searched([replace(problem, limit=enough) for problem in problems]).found:
            enough *= _GROWTH
        needed = enough * blocks.limit_bytes / limit + _memory_bytes(blocks.cluster) - blocks.limit_bytes
        return (
            f"no plan fits {blocks.program.name} into {_memory_bytes(blocks.cluster) / 2**20:.4g} MiB on each of {devices} devices; "
            f"about {needed / 2**20:.4g} MiB would do, or use more devices or a smaller batch than {blocks.batch}"
        )


_OUTER = ("stages", "micro_batches")


def _searched(problems: Sequence[Pipeline]) -> Outcome:
    """The best plans with one strategy for each stage, and the best with one for each block where that is another; bounds hold for both."""
    differing, same = search(problems, mixed), search(problems, alike, margin=MARGIN)
    others = [found for found in differing.found[:1] if any(len(set(stage.choices)) > 1 for stage in found.plan.stages)]
    found = sorted((*same.found[:SHOWN], *others), key=lambda each: each.plan.step_s)
    return replace(differing, found=tuple(found))


def _memory_bytes(cluster: Cluster) -> int:
    return min(node.device.memory_bytes for node in cluster.nodes)


def _words(plan: Plan) -> str:
    blocks = ", ".join(f"{stage.blocks} blocks {strategy}" for stage, strategy in zip(plan.stages, plan.strategies, strict=False))
    order = f"{len(plan.stages)} stages ({blocks}), {plan.schedule}" if plan.stages else str(plan.strategy)
    return f"{order}, {plan.micro_batches} micro-batch{'es' * (plan.micro_batches > 1)}"


def _simplest(judged: Sequence[Judged]) -> Judged:
    """Of those about as fast as the fastest the one with the fewest stages."""
    near = min(each.step_s for each in judged) * (1 + _AS_FAST)
    return min((each for each in judged if each.step_s <= near), key=lambda each: (len(each.plan.stages), each.step_s))


def _runner_up(best: Judged, judged: Sequence[Judged]) -> Iterator[str]:
    others = sorted((each for each in judged if each is not best), key=lambda each: each.step_s)
    if others and best.step_s:
        yield f"runner-up: {_words(others[0].plan)}, {others[0].step_s / best.step_s:.3g} times as long"

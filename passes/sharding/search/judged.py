"""Plans that the simulator has judged, and the result of a search."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hgc.cluster import Cluster
from hgc.ir.program import Program
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.hybrid import Outcome
from hgc.passes.sharding.search.space import block_graph
from hgc.plan import Plan, Prediction
from hgc.strategy import Strategy


@dataclass(frozen=True)
class Verdict:
    """A predicted step. ``fullness``: memory of the device that is nearest to its end, as a share of what it has."""

    predicted: Prediction
    fullness: float


Judge = Callable[[Program, Plan, Cluster], Verdict]
"""Predicts a step of a traced program under a plan; raises :class:`~hgc.errors.HgcError` for a plan that cannot be."""


@dataclass(frozen=True)
class Judged:
    """A plan with the judge's verdict."""

    plan: Plan
    predicted: Prediction
    fullness: float = 0.0

    @staticmethod
    def of(plan: Plan, verdict: Verdict) -> Judged:
        return Judged(plan, verdict.predicted, verdict.fullness)

    @property
    def step_s(self) -> float:
        return self.predicted.step_s or 0.0

    @property
    def memory_bytes(self) -> int:
        return self.predicted.memory_bytes or 0

    @property
    def fits(self) -> bool:
        return self.fullness <= 1


@dataclass(frozen=True)
class Searched:
    """What a search found: the best plan, all that the judge saw, and by the search's own costs the best and the bound.

    ``share``: of the memory, for what the numbers do not count. ``unmeasured``: strategies that the time limit left out.
    """

    best: Judged
    judged: tuple[Judged, ...]
    outcome: Outcome
    share: float
    unmeasured: int
    notes: tuple[str, ...]

    @property
    def plan(self) -> Plan:
        return replace(self.best.plan, predicted=self.best.predicted, notes=self.notes)


@dataclass(eq=False)
class Late:
    """Is it late? Then strategies whose graphs were not measured yet are left out, and counted in ``unmeasured``."""

    is_late: Callable[[], bool]
    unmeasured: int = 0
    _begun: set[Strategy] = field(default_factory=set)

    def __call__(self) -> bool:
        return self.is_late()

    def usable(self, blocks: ProgramBlocks, strategies: Sequence[Strategy], begin: bool) -> tuple[Strategy, ...]:
        """Those that :meth:`ProgramBlocks.usable` allows. ``begin``: nothing is there yet, so take time for one of them at least."""
        by_graph: dict[Strategy, list[Strategy]] = {}
        for strategy in strategies:
            by_graph.setdefault(block_graph(strategy), []).append(strategy)
        found = set[Strategy]()
        for graph, group in by_graph.items():
            if graph not in self._begun and self() and (found or not begin):
                self.unmeasured += len(group)
                continue
            self._begun.add(graph)
            found.update(blocks.usable(group))
        return tuple(strategy for strategy in strategies if strategy in found)


def places_of(plan: Plan) -> int:
    """Pipeline places: sets of ranks on which stages are."""
    return len({stage.first_rank for stage in plan.stages}) or 1


def in_words(plan: Plan) -> str:
    """On one line: strategies, what of a pipeline there is, micro-batches."""
    places = places_of(plan)
    strategies = list(dict.fromkeys(map(str, plan.strategies)))
    words = [f"pp{places}"] if places > 1 else []
    if len(strategies) == 1:
        words += strategies
    else:
        blocks = (f"{stage.blocks} x {strategy}" for stage, strategy in zip(plan.stages, plan.strategies, strict=True))
        words.append(f"({', '.join(blocks)})")
    words += [plan.schedule] if places > 1 else []
    return " ".join([*words, f"micro{plan.micro_batches}"] if plan.micro_batches > 1 else words)

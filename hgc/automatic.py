"""``plan="auto"``: the search with the simulator as its judge, for whoever knows how to lower a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from hgc.backends import simulator
from hgc.cluster import Cluster
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import HgcError, PlanError
from hgc.ir.program import Program
from hgc.passes.sharding.recompute import Recompute
from hgc.passes.sharding.search.judged import Verdict
from hgc.passes.sharding.search.planner import SearchPlanner
from hgc.passes.sharding.search.space import lowered_alike
from hgc.passes.sharding.uniform import UniformPlanner
from hgc.plan import Plan, Prediction
from hgc.simulation import stage_key, stage_programs

Lower = Callable[[Program, Plan], Program]
"""Applies a plan without stages to a single-device program, as ``hgc.compiler.distribute`` does."""


def verdict(found: simulator.Simulation, cluster: Cluster) -> Verdict:
    """What a simulation on ``cluster`` says of its plan."""
    return Verdict(Prediction(found.step_s, int(found.peak_bytes), basis="simulated"), found.fullness(cluster))


@dataclass(frozen=True)
class Judge:
    """Simulates plans of one program, at any example sizes; stages that were lowered and measured once serve all plans that have them."""

    lower: Lower
    known: dict[tuple[str, str], simulator.StageProgram] = field(default_factory=dict)
    _lowered: dict[tuple[str, str], Program] = field(default_factory=dict)

    def __call__(self, traced: Program, plan: Plan, cluster: Cluster) -> Verdict:
        return verdict(self.simulate(traced, plan, cluster), cluster)

    def simulate(self, traced: Program, plan: Plan, cluster: Cluster) -> simulator.Simulation:
        """Raises what lowering raises, and :class:`~hgc.errors.HgcError` for a plan that does not fit program or cluster."""
        sizes = {symbol.name: float(found.hint) for symbol, found in traced.symbols.items()}
        return simulator.simulate(stage_programs(traced, plan, self._lower, known=self.known), plan, cluster, sizes)

    def _lower(self, program: Program, plan: Plan) -> Program:
        """ZeRO is the runtime's, and recomputation marks the graph that there is without it: such plans share what was lowered."""
        graph = replace(plan, strategy=lowered_alike(plan.strategy))
        key = stage_key(program, graph.strategy)
        if key not in self._lowered:
            self._lowered[key] = self.lower(program, graph)
        return Recompute().run(self._lowered[key].copy(), plan)


def search_planner(lower: Lower, judge: Judge, **options: Any) -> SearchPlanner:
    """The search, with ``options`` of :class:`SearchPlanner`."""

    def measured(program: Program, plan: Plan) -> tuple[Program, ProgramCosts]:
        (found,) = stage_programs(program, plan, lower)
        return found.program, found.costs

    return SearchPlanner(measured, judge, **options)


def automatic(traced: Program, cluster: Cluster, planner: SearchPlanner) -> Plan:
    """The search's plan; the uniform planner's is one of those that are compared, unless parts are pinned.

    One device that fits leaves nothing to search. Where the search fails the uniform plan is taken if it fits, with the reason.
    """
    uniform = None if planner.pins else _uniform(traced, cluster)
    if uniform is not None and cluster.devices == 1:
        return uniform
    try:
        return replace(planner, also=(Plan(uniform.strategy),) if uniform is not None else ()).run(traced, cluster)
    except HgcError as error:
        if uniform is None:
            raise
        usual = planner.judge(traced, uniform, cluster)
        if usual.fullness > 1:
            raise
        return replace(uniform, predicted=usual.predicted, notes=(*uniform.notes, f"the search found no plan: {error}"))


def _uniform(traced: Program, cluster: Cluster) -> Plan | None:
    try:
        return UniformPlanner().run(traced, cluster)
    except PlanError:
        return None

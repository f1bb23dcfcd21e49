"""hgc's own plan for a published job, and the published plan, simulated alike: same model, cluster, batch, precision and runtime."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch

from hgc.automatic import verdict
from hgc.backends.simulator import Options, Simulation, StageProgram, simulate
from hgc.cluster import Cluster
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import HgcError
from hgc.ir.program import Program
from hgc.passes.sharding.search.judged import Verdict, in_words
from hgc.passes.sharding.search.planner import SearchPlanner
from hgc.passes.sharding.search.space import lowered_alike
from hgc.passes.sharding.stages import cut
from hgc.plan import Plan
from hgc.simulation import linked, stage_key
from hgc.strategy import RECOMPUTE, Strategy
from hgc.tools.bench.fidelity_models import NotRebuilt, build, example
from hgc.tools.bench.fidelity_plans import plan_of, precision_of, recompute_of
from hgc.tools.bench.fidelity_predict import Case
from hgc.tools.bench.fidelity_programs import FEW, lowered, widened
from hgc.tracing import trace


@dataclass(frozen=True)
class Compared:
    """A published row and hgc's plan for the same job. ``reason``: why there is no comparison, ``""`` if there is one;
    without ``published_s`` the published plan could not be simulated, without ``found_s`` hgc found none.

    ``ratio``: published plan's simulated step over that of hgc's plan; ``search_s``: processor seconds of one search, measuring
    included. ``published``, ``found``: the plans in words.
    """

    id: str
    dataset: str
    reason: str = ""
    published_s: float = 0.0
    found_s: float = 0.0
    published: str = ""
    found: str = ""
    search_s: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def ratio(self) -> float:
        return self.published_s / self.found_s if self.found_s else 0.0


Known = dict[tuple[str, str], StageProgram]
"""Stages that were lowered and measured, by :func:`~hgc.simulation.stage_key`, for jobs of one architecture."""


@dataclass(frozen=True)
class Alike:
    """Lowers, measures and simulates what both plans have, each distinct stage once; ``dp`` divides the batch and nothing else."""

    case: Case
    known: Known = field(default_factory=dict)

    def measured(self, program: Program, plan: Plan) -> tuple[Program, ProgramCosts]:
        """For the search: a block as the plan's strategy lowers it."""
        found = self._once(program, plan.strategy)
        return found.program, found.costs

    def judge(self, program: Program, plan: Plan, cluster: Cluster) -> Verdict:
        return verdict(self.simulate(program, plan, cluster), cluster)

    def simulate(self, program: Program, plan: Plan, cluster: Cluster) -> Simulation:
        pairs = zip(cut(program, plan), plan.strategies, strict=True)
        stages = [linked(self._once(stage, strategy), stage) for stage, strategy in pairs]
        options = Options("adamw", clip=True, execution=self.case.generation.execution)
        return simulate(stages, plan, cluster, None, options)

    def _once(self, stage: Program, strategy: Strategy) -> StageProgram:
        few = replace(lowered_alike(strategy), dp=min(strategy.dp, FEW))
        key = stage_key(stage, few)
        if key not in self.known:
            self.known[key] = lowered(stage.copy(), Plan(few))
        return widened(self.known[key], "dp", strategy.dp)


def compared(cases: list[Case], known: Known | None = None) -> list[Compared]:
    """Rows that differ in their plan only; hgc's is searched once. What hgc refuses is a reason, and the other rows go on."""
    alike = Alike(cases[0], {} if known is None else known)
    try:
        program = traced(cases[0])
    except HgcError as refused:
        return [Compared(case.row.id, case.row.dataset, f"cannot be traced: {refused}") for case in cases]
    plans: dict[Cluster, tuple[Plan, float]] = {}
    return [_compared(case, replace(alike, case=case), program, plans) for case in cases]


def traced(case: Case) -> Program:
    """The row's model with the row's global batch as its example."""
    layout, precision = case.layout, precision_of(case.row, case.generation, case.layout)
    model = build(case.architecture, getattr(torch, precision.compute))
    made = trace(model, example(8, case.architecture.positions), name="Decoder")
    batch = layout.dp * layout.mbs * layout.micro_batches
    made.symbols = {
        symbol: replace(found, hint=batch if found.meaning == "batch" else found.hint) for symbol, found in made.symbols.items()
    }
    return made


def _compared(case: Case, alike: Alike, program: Program, known: dict[Cluster, tuple[Plan, float]]) -> Compared:
    row = case.row
    try:
        published, plan = _published(case, alike, program)
    except HgcError as refused:
        return Compared(row.id, row.dataset, f"the published plan cannot be simulated: {refused}")
    cluster = with_room(case.cluster, published.peak_bytes)
    try:
        if cluster not in known:
            began_s = time.process_time()
            planner = SearchPlanner(alike.measured, alike.judge, precision=plan.precision, execution=case.generation.execution)
            known[cluster] = planner.run(program, cluster), time.process_time() - began_s
    except HgcError as refused:
        return Compared(row.id, row.dataset, f"hgc finds no plan: {refused}", published.step_s, published=in_words(plan))
    made, search_s = known[cluster]
    notes = (*case.notes, *made.notes)
    if cluster != case.cluster:
        notes = (*notes, "the published plan does not fit by simulation; devices have what it takes, for both plans")
    step_s = made.predicted.step_s or 0.0
    return Compared(row.id, row.dataset, "", published.step_s, step_s, in_words(plan), in_words(made), search_s, notes)


def _published(case: Case, alike: Alike, program: Program) -> tuple[Simulation, Plan]:
    """Where the source says nothing of recomputation, it is the least that fits into memory."""
    stated = recompute_of(case.row)
    capacity = case.cluster.nodes[0].device.memory_bytes
    for recompute in (stated,) if stated else RECOMPUTE:
        plan = plan_of(case.row, case.layout, case.generation, case.architecture.layers, recompute)
        found = alike.simulate(program, plan, case.cluster)
        if found.peak_bytes <= capacity:
            break
    return found, plan


def with_room(cluster: Cluster, needed_bytes: float) -> Cluster:
    """Devices of at least so much memory: where the simulator has the published plan take more than there is, it overestimates both."""
    room = max(int(needed_bytes) + 1, cluster.nodes[0].device.memory_bytes)
    nodes = tuple(replace(node, device=replace(node.device, memory_bytes=room)) for node in cluster.nodes)
    return cluster if room == cluster.nodes[0].device.memory_bytes else replace(cluster, nodes=nodes)


def job_of(case: Case) -> tuple[object, ...]:
    """Equal for rows that are the same job: all but the plan."""
    layout = case.layout
    batch = layout.dp * layout.mbs * layout.micro_batches
    precision = precision_of(case.row, case.generation, layout)
    return case.architecture, case.cluster, batch, precision, case.generation.execution


EXPERTS = ("Megatron-LM", "Megatron-Core", "Megatron-Bridge", "NeMo", "torchtitan", "nanotron")
"""Starts of frameworks whose published plans experts have tuned."""


def check_expert(case: Case) -> None:
    """Raises :class:`NotRebuilt` for a row that states no expert's plan."""
    if not case.row.framework.startswith(EXPERTS):
        raise NotRebuilt(f"{case.row.framework} is none of {', '.join(EXPERTS)}")
    if case.row.ran_out_of_memory:
        raise NotRebuilt("it ran out of memory")

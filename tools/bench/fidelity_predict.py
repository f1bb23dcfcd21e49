"""Prediction of one published row: model, plan and cluster rebuilt, lowered, and simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

from hgc.backends.simulator import Options, Simulation, simulate
from hgc.cluster import Cluster
from hgc.errors import HgcError
from hgc.strategy import RECOMPUTE
from hgc.tools.bench.fidelity_execution import Generation, conditions_of, generation_of, printed_bytes
from hgc.tools.bench.fidelity_models import Architecture, NotRebuilt, architecture
from hgc.tools.bench.fidelity_plans import Layout, cluster_of, layout_of, plan_of, recompute_of, stage_layers
from hgc.tools.bench.fidelity_programs import Programs
from hgc.tools.bench.fidelity_rows import Row, Shape
from hgc.tools.bench.fidelity_statistics import Outcome


@dataclass(frozen=True)
class Case:
    """A row as hgc understands it. ``notes``: everything that was assumed."""

    row: Row
    architecture: Architecture
    generation: Generation
    layout: Layout
    cluster: Cluster
    notes: tuple[str, ...]


def case_of(row: Row, shapes: dict[str, Shape], siblings: list[Row]) -> Case:
    """Raises :class:`NotRebuilt` with what is missing."""
    if row.task == "lora":
        raise NotRebuilt("LoRA: the source does not state rank and targets")
    generation = generation_of(row)
    found, said = architecture(row, shapes, siblings, generation.dropout, generation.flash)
    layout = layout_of(row, found.layers)
    cluster, network = cluster_of(row)
    known = tuple(condition.reason for condition in conditions_of(row))
    return Case(row, found, generation, layout, cluster, (f"runs as {generation.name}", *known, *said, *layout.notes, *network))


def _printed_bytes(case: Case, found: Simulation) -> float:
    """The fullest device's memory as the row's source counts it."""
    tensors = found.fullest.tensors
    allocator = case.generation.execution.fragmentation * tensors
    return printed_bytes(case.row, tensors, allocator, found.fullest.total - tensors - allocator)


@dataclass
class Predictor:
    """Predicts rows; what rows have in common is traced, lowered and measured once."""

    programs: Programs = field(default_factory=Programs)

    def __call__(self, case: Case) -> Outcome:
        """What the row's plan is predicted to take; an :class:`Outcome` with a reason if hgc refuses the plan, or fails at it."""
        capacity = float(case.cluster.nodes[0].device.memory_bytes)
        try:
            found, notes = self._simulated(case, capacity)
        except HgcError as refused:
            return Outcome(case.row, reason=f"hgc refuses the plan: {refused}", notes=case.notes)
        except Exception as failed:  # a fault of hgc: it is reported as such, and the other rows go on
            return Outcome(case.row, reason=f"hgc fails with {type(failed).__name__}: {failed}", notes=case.notes)
        printed = _printed_bytes(case, found)
        room = capacity - (found.peak_bytes - printed)
        return Outcome(case.row, found.step_s, printed, room, notes=(*case.notes, *notes))

    def _simulated(self, case: Case, capacity: float) -> tuple[Simulation, tuple[str, ...]]:
        """Where the source says nothing of recomputation, it is the least that fits into memory."""
        stated = recompute_of(case.row)
        if stated:
            return self._simulate(case, stated), () if case.row.recompute else (f"recomputation is not stated, {stated!r} assumed",)
        for recompute in RECOMPUTE:
            found = self._simulate(case, recompute)
            if found.peak_bytes <= capacity:
                break
        return found, (f"recomputation is not stated, {recompute!r} assumed: the least that fits",)

    def _simulate(self, case: Case, recompute: str) -> Simulation:
        layout, layers = case.layout, case.architecture.layers
        plan = plan_of(case.row, layout, case.generation, layers, recompute)
        stages = self.programs.stages(case.architecture, plan, stage_layers(layers, layout.pp * layout.vpp))
        sizes = {"b": float(layout.dp * layout.mbs * layout.micro_batches), "s": float(case.architecture.positions)}
        return simulate(stages, plan, case.cluster, sizes, Options("adamw", clip=True, execution=case.generation.execution))

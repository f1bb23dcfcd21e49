"""The search beside the recorded results of Galvatron's public engine: plans of both priced by one model, and processor time."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hgc.errors import ArtifactError
from hgc.passes.sharding.search.galvatron import engine_step_s
from hgc.passes.sharding.search.hybrid import Outcome, search
from hgc.passes.sharding.search.pipeline import Pipeline, StagePlan, measured, spans, step_s
from hgc.passes.sharding.search.solve import solve
from hgc.passes.sharding.search.space import Tree
from hgc.tools.bench.search_profiles import CONTEXT_BYTES, Problems, Recorded, limit_bytes, problems, recorded
from hgc.tools.bench.targets import target

_WORDS = re.compile(r"(\d+)-(\d+)(\*?)-(\d+)(f?)(-c)? x(\d+)")
TOLERANCE = 1e-4
"""Of each stage's strategies: nearer to the best than the search's own, so that plans that are equally good come out so."""
_SAME = 1e-3
"""Steps that differ by less count as equal."""
ALLOCATOR = 0.03
"""What hgc reserves beside tensors (``Execution.fragmentation``) in place of the engine's flat fifth."""


@dataclass(frozen=True)
class Beside:
    """One recorded search and hgc's, in seconds of a step under Galvatron's costs.

    ``_s``: by the paper's formula for pipelines, ``_engine_s``: by that of release 2.4.0. ``without_reserve_s``: hgc's plan where only the
    allocator's share is reserved. ``printed_s``: what the engine printed for its plan. ``printed_share``: memory as it printed over that of
    the same plan here, by which budgets are corrected.
    """

    row: Recorded
    public_s: float
    public_engine_s: float
    found_s: float
    found_engine_s: float
    printed_s: float
    printed_share: float
    solver_s: float
    gap: float
    plan: str
    without_reserve_s: float

    @property
    def ratio(self) -> float:
        """The public plan's step over that of hgc's."""
        return self.public_s / self.found_s


def beside(folder: Path, row: Recorded) -> Beside:
    """Both plans under one model and one budget: the memory that the engine printed for its plan is what that plan takes here."""
    public = public_stages(folder, row)
    most = max(stage.memory for stage in public) + CONTEXT_BYTES
    used = max(row.memory_mib) * 2**20 * (limit_bytes(row) + CONTEXT_BYTES) / (row.budget_gb * 2**30)
    share, count = used / most, row.micro_batches
    began_s = time.process_time()
    found = _within((limit_bytes(row) + CONTEXT_BYTES) / share, folder, row)
    solver_s = time.process_time() - began_s
    best = found.found[0]
    whole = _within(max(row.budget_gb * 2**30 / (1 + ALLOCATOR), limit_bytes(row) + CONTEXT_BYTES) / share, folder, row)
    return Beside(
        row,
        step_s(public, count),
        engine_step_s(public, count),
        best.plan.step_s,
        engine_step_s(best.plan.stages, best.problem.micro_batches),
        row.samples / row.throughput,
        share,
        solver_s,
        found.gap,
        f"{best.problem.stages} stages of {'+'.join(map(str, best.plan.cuts))}, {best.problem.micro_batches} micro-batches",
        whole.found[0].plan.step_s,
    )


def _within(memory_bytes: float, folder: Path, row: Recorded) -> Outcome:
    return search([replace(each, limit=memory_bytes - CONTEXT_BYTES) for each in problems(folder, row)], _closely)


def _closely(problem: Pipeline, stage: int, start: int, end: int) -> tuple[tuple[int, ...], float] | None:
    found = solve(problem.chain(stage, start, end), TOLERANCE)
    return (found.choices, found.lower_bound_s) if found is not None else None


def public_stages(folder: Path, row: Recorded) -> list[StagePlan]:
    """The recorded plan, measured as one of ours; embedding and output layer count as blocks of the first and the last stage."""
    made = Problems(folder, row)
    known, wanted = made.strategies(len(row.cuts)), recorded_trees(row.plan)
    missing = [tree for tree in wanted if tree not in known]
    if missing:
        raise ArtifactError(f"the recorded plan of {row.name} has {missing[0]}, which its space has not; check the row's plan and stages")
    chosen = [known.index(tree) for tree in wanted]
    choices = [chosen[0], *chosen, chosen[-1]]
    cuts = [size + (stage == 0) + (stage == len(row.cuts) - 1) for stage, size in enumerate(row.cuts)]
    problem: Pipeline = made.problem(len(row.cuts), row.micro_batches, row.vocabulary_tp)
    return [measured(problem, stage, start, choices[start:end]) for stage, (start, end) in enumerate(spans(cuts))]


def recorded_trees(plan: str) -> list[Tree]:
    """Of each layer, from ``"2-1-8f-c x11 | 2-1-8 x21"``: stages, tensor parallel (``*``: neighbours), data parallel (``f``: ZeRO 3),
    ``-c``: recomputed. Raises ``ArtifactError`` for other words."""
    found: list[Tree] = []
    for run in plan.split(" | "):
        match = _WORDS.fullmatch(run)
        if match is None:
            raise ArtifactError(f"{run!r} is no run of layers; expected words such as '2-1-8f-c x11'")
        stages, tp, near, data, sharded, again, count = match.groups()
        shared = [("sdp" if sharded else "dp", int(data))] if int(data) > 1 else []
        split = [("tp", int(tp))] if int(tp) > 1 else []
        levels = tuple(shared + split if near else split + shared)
        found += [Tree(int(stages), levels, bool(again))] * int(count)
    return found


def compare(folder: Path, rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Targets of all recorded searches; ``rows`` get what JSON should hold."""
    found = [beside(folder, row) for row in recorded(folder)]
    rows += [encoded(each) for each in found]
    ratios = [each.ratio for each in found]
    times = [each.row.cpu_s / each.solver_s for each in found if each.row.own_core]
    printed = [abs(each.public_engine_s / each.printed_s - 1) for each in found]
    yield target("public plan priced here over what the engine printed, median distance from 1", _median(printed), 0.02)
    yield target("step, public plan / hgc's, worst (no worse)", min(ratios, default=0.0), 1 - _SAME, at_least=True)
    faster = "share of recorded searches in which hgc's plan is faster"
    best = [ratio > 1 + _SAME or each.gap <= _SAME for ratio, each in zip(ratios, found, strict=True)]
    yield target(faster, _share(ratio > 1 + _SAME for ratio in ratios), 0.5, at_least=True)
    yield target("the same, or no plan of the space can be faster (by its bound)", _share(best), 1.0, at_least=True)
    whole = [each.public_s / each.without_reserve_s for each in found]
    yield target(f"{faster}, without the engine's flat reserve", _share(ratio > 1 + _SAME for ratio in whole), 0.5, at_least=True)
    yield target("processor time, public engine (recorded) / hgc, median", _median(times), 20, at_least=True)


def encoded(found: Beside) -> dict[str, Any]:
    return {
        "kind": "public",
        "name": found.row.name,
        "tag": found.row.tag,
        "ratio": found.ratio,
        "ratio_by_engine_formula": found.public_engine_s / found.found_engine_s,
        "ratio_without_reserve": found.public_s / found.without_reserve_s,
        "samples_per_s": found.row.samples / found.found_s,
        "public_samples_per_s": found.row.samples / found.public_s,
        "printed_samples_per_s": found.row.throughput,
        "solver_s": found.solver_s,
        "public_solver_s": found.row.cpu_s if found.row.own_core else None,
        "gap": found.gap,
        "plan": found.plan,
        "public_plan": found.row.plan,
        "priced_over_printed": found.public_engine_s / found.printed_s,
        "memory_printed_over_here": found.printed_share,
    }


def _share(holds: Iterable[bool]) -> float:
    found = list(holds)
    return sum(found) / max(len(found), 1)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0

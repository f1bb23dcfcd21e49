"""``hgc bench search``: the search against references: counts, brute force, the exact dynamic programme, all cuts, time.

With ``--data`` also against the recorded searches of Galvatron's public engine. Seconds are processor time of one core, model of
costs included and tracing excluded.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from hgc.passes.sharding.search.exact import brute_force, solve_exact
from hgc.passes.sharding.search.hybrid import search
from hgc.passes.sharding.search.partition import balance, bmw, walk_then_all
from hgc.passes.sharding.search.pipeline import Stages
from hgc.passes.sharding.search.problem import Chain
from hgc.passes.sharding.search.solve import solve
from hgc.passes.sharding.search.space import trees
from hgc.tools.bench import search_public
from hgc.tools.bench.machine import machine
from hgc.tools.bench.search_problems import LARGEST, MODELS, layer, problem, problems, random_chain, rounded
from hgc.tools.bench.targets import Target, target, target_table
from hgc.tools.console import say, stage, table

_Result = TypeVar("_Result")
COUNTS = {8: (22, 44), 16: (37, 74), 32: (56, 112), 64: (79, 158), 1024: (211, 422)}
"""Devices -> trees without and with recomputation: 22 and 44 are published, the others follow from the same rules."""
STEPS = 4000
"""Steps of memory of the exact dynamic programme."""
SEARCHES = (
    (MODELS[0], 8, 64, 8, 8, math.inf),
    (MODELS[0], 8, 64, 16, 8, math.inf),
    (MODELS[1], 8, 64, 8, 8, math.inf),
    (MODELS[2], 8, 64, 24, 8, math.inf),
    (MODELS[3], 8, 64, 40, 8, math.inf),
    (MODELS[2], 64, 256, 24, 8, 1.0),
    (MODELS[2], 64, 256, 40, 8, 1.0),
    (LARGEST, 1024, 2048, 80, 32, 10.0),
)
"""Model, devices, batch, GB of a device, most stages, seconds that the search may take."""


def run(data: str | None = None, cases: int = 500) -> dict[str, Any]:
    """Print the table and return what JSON should hold. ``cases``: random instances for brute force. ``data``: folder of the profiles."""
    rows: list[dict[str, Any]] = []
    with stage("counts"):
        found = [*_counts()]
    with stage("brute force"):
        found.append(_brute_force(cases))
    with stage("exact dynamic programme"):
        found += _gaps(rows)
    with stage("cuts"):
        found += _cuts(rows)
    with stage("searches"):
        found += _searches(rows)
    if data is not None:
        with stage("public engine"):
            found += search_public.compare(Path(data), rows)
    table(target_table("the search against references", found))
    say("gap: how much longer the plan takes than the reference; proven: than the lower bound that the solver returns with it")
    return {"bench": "search", "machine": machine(), "rows": rows, "targets": found}


def _counts() -> Iterator[Target]:
    for devices, wanted in COUNTS.items():
        counted = len(trees(devices, recompute=False)), len(trees(devices))
        yield target(f"strategies on {devices} devices", counted[1], wanted[1]) | {"holds": counted == wanted}


def _brute_force(cases: int) -> Target:
    unlike = 0
    for seed in range(cases):
        chain = random_chain(seed)
        wanted, found = brute_force(chain), solve(chain, tolerance=0.0)
        if wanted is None or found is None:
            unlike += wanted is not found
        else:
            unlike += not math.isclose(wanted.time_s, found.time_s, rel_tol=1e-9)
    return target(f"random instances of {cases} with another cost than brute force", unlike, 0)


def _gaps(rows: list[dict[str, Any]]) -> Iterator[Target]:
    gaps, proven, ratios = [], [], []
    for name, chain in _chains():
        wanted, exact_s = _timed(lambda chain=chain: solve_exact(chain))  # type: ignore[misc]
        found, solver_s = _timed(lambda chain=chain: solve(chain))  # type: ignore[misc]
        if wanted is None or found is None:
            continue
        gaps.append(found.time_s / wanted.time_s - 1)
        proven.append(found.gap)
        ratios.append(exact_s / solver_s)
        rows.append({"kind": "stage", "name": name, "gap": gaps[-1], "proven": proven[-1], "exact_s": exact_s, "solver_s": solver_s})
    yield target("gap to the exact programme, median", statistics.median(gaps), 0.005)
    yield target("gap to the exact programme, worst", max(gaps), 0.01)
    yield target("proven gap, median", statistics.median(proven), 0.005)
    yield target("proven gap, worst", max(proven), 0.01)
    say(f"processor time, exact programme with {STEPS} steps of memory / solver: {statistics.median(ratios):.3g} in the median")


def _chains() -> Iterator[tuple[str, Chain]]:
    for model in MODELS[:3]:
        layers = (layer(model.hidden, model.sequence, model.flops_per_s, element_bytes=model.element_bytes),) * model.layers
        for stages, micro_batches in ((1, 8), (2, 8), (4, 8)):
            chain = problem(layers, 8, stages, 64, micro_batches, 0.0, model.bytes_per_s).chain(0, 0, model.layers // stages)
            for share in (0.1, 0.4, 0.7):
                yield f"{model.name}, {stages} stages, {share:.0%}", rounded(chain, share, STEPS)


def _cuts(rows: list[dict[str, Any]]) -> Iterator[Target]:
    """Where memory is so tight that it decides about cuts."""
    model = MODELS[0]
    layers = (layer(model.hidden, model.sequence, model.flops_per_s),) * model.layers
    loose = problem(layers, 8, 4, 64, 16, 0.0)
    least = float(loose.memory(0).min(axis=1).sum()) / loose.stages
    worst, gain = 0.0, 1.0
    for factor in (1.6, 2.0, 2.5, 3.0, 4.0, 6.0):
        given = problem(layers, 8, 4, 64, 16, least * factor)
        walk, best = bmw(given).best, walk_then_all(given, Stages(given))
        if walk is not None and best is not None:
            worst, gain = max(worst, best.step_s / walk.step_s), max(gain, walk.step_s / best.step_s)
            row = {"kind": "cuts", "factor": factor, "walk": walk.cuts, "walk_s": walk.step_s, "best": best.cuts, "best_s": best.step_s}
            rows.append(row | {"balance": asdict(balance(best, given))})
    say(f"steps with the cuts of BMW's walk take up to {gain:.3g} times as long as with the best cuts")
    yield target("step with the best cuts / with those of BMW's walk, worst", worst, 1.0)


def _searches(rows: list[dict[str, Any]]) -> Iterator[Target]:
    for model, devices, samples, limit_gb, most_stages, limit_s in SEARCHES:
        found, taken_s = _timed(lambda given=(model, devices, samples, limit_gb * 1e9, most_stages): search(problems(*given)))  # type: ignore[misc]
        name = f"{model.name}, {devices} devices, {limit_gb} GB"
        best = found.found[0]
        row = {"kind": "search", "name": name, "solver_s": taken_s, "step_s": best.plan.step_s, "gap": found.gap, "cuts": best.plan.cuts}
        rows.append(row | {"searched": found.searched, "left_out": found.left_out, "stages": best.problem.stages})
        if math.isfinite(limit_s):
            yield target(f"seconds: {name}", taken_s, limit_s)
    yield target("proven gap of whole searches, worst", max(row["gap"] for row in rows if row["kind"] == "search"), 0.05)


def _timed(work: Callable[[], _Result]) -> tuple[_Result, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start

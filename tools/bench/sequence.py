"""``hgc bench sequence``: groups for batches of unlike lengths: time and quality of the planner, the paper's ratios, and beyond.

``--data``: the folder with ``wikipedia_lengths.npy``. Seconds of planning are processor time of one core. The baseline is FlexSP's planner
(arXiv:2412.01523) under its own published constants; step times come from those constants, none is measured.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from hgc.errors import HgcError
from hgc.passes.sequence.baselines import batch_adaptive, megatron, ulysses
from hgc.passes.sequence.costs import Fleet, Numbers, SequenceCosts
from hgc.passes.sequence.groups import SequencePlan, check
from hgc.passes.sequence.paper import flexsp
from hgc.passes.sequence.planner import plan_batch
from hgc.tools.bench.machine import machine
from hgc.tools.bench.sequence_published import FLEET, LAWS, MEMORY_BYTES, MODELS, SPEEDUPS, Lengths, Model
from hgc.tools.bench.targets import target, target_table
from hgc.tools.console import say, stage, table

Row = dict[str, Any]
MILP_S = 15.0
"""For each micro-batch, as in the paper."""
MILP_TRIED = 2
"""Numbers of micro-batches it tries; every further one has cost more than it gained."""
BATCHES = 10
"""Of each data set, for ratios."""


def run(data: str | None = None, cases: int = 10, seed: int = 0) -> dict[str, Any]:
    """Print tables and return what JSON should hold. ``cases``: batches that are given to the MILP as well."""
    if data is None:
        raise HgcError("the benchmark 'sequence' needs sequence lengths; name their folder with --data")
    lengths, rows, targets = Lengths(Path(data), seed), list[Row](), list[Row]()
    with stage("planner"):
        targets += _planner(lengths, rows, FLEET, 512, 20, 0.3)
        targets += _planner(lengths, rows, Fleet(1024, 8), 8192, 3, 3.0)
    with stage("published ratios"):
        targets += _ratios(lengths, rows)
    with stage("beyond"):
        targets += _beyond(lengths, rows)
    with stage("mixed-integer programme"):
        targets += _milp(lengths, rows, cases)
    table(_ratio_table(rows))
    table(_gain_table(rows))
    say("FlexSP: its micro-batches, solved by hgc's packing; Ulysses: one degree for the run")
    table(target_table("groups for unlike lengths", targets))
    return {"bench": "sequence", "machine": machine(), "rows": rows, "targets": targets}


def _planner(lengths: Lengths, rows: list[Row], fleet: Fleet, count: int, batches: int, limit_s: float) -> Iterator[Row]:
    costs = MODELS[0].costs(MODELS[0].everywhere(192, priced=False))
    found, taken, worse = [], [], 0
    for number in range(batches):
        batch = lengths.batch("Wikipedia", 192, count, number)
        plan, seconds = _timed(batch, costs, fleet)
        check(plan, batch, costs, fleet)
        worse += plan.seconds > batch_adaptive(batch, costs, fleet).seconds
        found.append(plan)
        taken.append(seconds)
        row = {"kind": "planner", "devices": fleet.devices, "sequences": count, "planning_s": seconds, "gap": plan.gap}
        rows.append(row | _shape(plan))
    name = f"{fleet.devices} devices, {count} sequences"
    yield target(f"{name}: planning, median s", statistics.median(taken), limit_s)
    if fleet is FLEET:
        yield target(f"{name}: above the bound of its micro-batches, median", statistics.median(plan.gap for plan in found), 0.03)
    yield target(f"{name}: batches slower than groups of one degree", worse, 0)


def _timed(batch: Numbers, costs: SequenceCosts, fleet: Fleet) -> tuple[SequencePlan, float]:
    began = time.process_time()
    plan = plan_batch(batch, costs, fleet)
    return plan, time.process_time() - began


def _shape(plan: SequencePlan) -> Row:
    return {"step_s": plan.seconds, "groups": [str(each) for each in plan.micro_batches]}


def _ratios(lengths: Lengths, rows: list[Row]) -> Iterator[Row]:
    """ZeRO-3 over all devices is priced: published seconds are a fifth longer than without."""
    errors = []
    for model, data, limit_k in _settings(("Wikipedia", *LAWS)):
        costs = model.costs(model.everywhere(limit_k))
        sums = dict.fromkeys(("ulysses", "megatron", "batch adaptive", "flexsp"), 0.0)
        for number in range(BATCHES):
            batch = lengths.batch(data, limit_k, 512, number)
            sums["ulysses"] += ulysses(batch, costs, FLEET, limit_k * 1024).seconds
            sums["batch adaptive"] += batch_adaptive(batch, costs, FLEET).seconds
            sums["megatron"] += megatron(batch, costs, FLEET, limit_k * 1024, model.shape)
            sums["flexsp"] += flexsp(batch, costs, FLEET).seconds
        over = {name: total / sums["flexsp"] for name, total in sums.items()}
        published = SPEEDUPS[model.name, data][limit_k]
        errors.append(abs(over["ulysses"] / published[0] - 1))
        row = _setting("ratio", model, data, limit_k) | {"step_s": sums["flexsp"] / BATCHES, "over": over}
        rows.append(row | {"published": {"ulysses": published[0], "megatron": published[1]}})
    yield target("emulated over published speed-up over Ulysses, median error", statistics.median(errors), 0.10)
    yield target("emulated over published speed-up over Ulysses, worst error", max(errors), 0.10)


def _beyond(lengths: Lengths, rows: list[Row]) -> Iterator[Row]:
    """Sharding inside nodes, rings across nodes, against FlexSP with its micro-batches solved to the end and ZeRO-3 over all devices."""
    gains: dict[str, list[float]] = {"Wikipedia": [], "CommonCrawl": []}
    for model, data, limit_k in _settings(tuple(gains)):
        theirs, ours = 0.0, 0.0
        options = _options(model, limit_k)
        for number in range(BATCHES):
            batch = lengths.batch(data, limit_k, 512, number)
            theirs += flexsp(batch, options[0], FLEET).seconds
            ours += min(plan_batch(batch, costs, FLEET).seconds for costs in options if _holds(batch, costs))
        gains[data].append(theirs / ours)
        rows.append(_setting("beyond", model, data, limit_k) | {"gain": theirs / ours, "step_s": ours / BATCHES})
    for data, limit in (("Wikipedia", 1.15), ("CommonCrawl", 1.08)):
        name = f"{data}: FlexSP's optimum over hgc's step, median of models"
        yield target(name, statistics.median(gains[data]), limit, at_least=True)


def _settings(data: tuple[str, ...]) -> Iterator[tuple[Model, str, int]]:
    for model in MODELS:
        for name in data:
            for limit_k in (192, 384):
                yield model, name, limit_k


def _setting(kind: str, model: Model, data: str, limit_k: int) -> Row:
    return {"kind": kind, "model": model.name, "data": data, "limit_k": limit_k}


def _options(model: Model, limit_k: int) -> list[SequenceCosts]:
    """The paper's way first, then rings across nodes, and parameters sharded inside nodes where they leave room for tokens."""
    found = [model.costs(model.everywhere(limit_k)), model.costs(model.everywhere(limit_k), model.ring())]
    if model.in_nodes(limit_k).state_bytes < MEMORY_BYTES:
        found += [model.costs(model.in_nodes(limit_k)), model.costs(model.in_nodes(limit_k), model.ring())]
    return found


def _holds(batch: Numbers, costs: SequenceCosts) -> bool:
    return float(batch.max()) <= FLEET.degrees[-1] * costs.tokens_per_device


def _milp(lengths: Lengths, rows: list[Row], cases: int) -> Iterator[Row]:
    costs = MODELS[0].costs(MODELS[0].everywhere(192, priced=False))
    better = 0
    for number in range(cases):
        batch = lengths.batch("Wikipedia", 192, 512, number)
        ours, theirs = plan_batch(batch, costs, FLEET), flexsp(batch, costs, FLEET, "milp", MILP_S, tried=MILP_TRIED)
        better += ours.seconds < theirs.seconds
        rows.append({"kind": "milp", "batch": number, "hgc_s": ours.seconds, "milp": _shape(theirs)})
    yield target(f"batches of {cases} better than the MILP given {MILP_S:g} s a micro-batch", better, 0.9 * cases, at_least=True)


def _ratio_table(rows: list[Row]) -> Table:
    shown = Table("model", "data", "longest", "over Ulysses", "published", "over Megatron", "published", "over batch adaptive", "step s")
    for row in rows:
        if row["kind"] == "ratio":
            over, published = row["over"], row["published"]
            ratios = over["ulysses"], published["ulysses"], over["megatron"], published["megatron"], over["batch adaptive"]
            shown.add_row(row["model"], row["data"], f"{row['limit_k']}K", *(f"{ratio:.2f}" for ratio in ratios), f"{row['step_s']:.1f}")
    return shown


def _gain_table(rows: list[Row]) -> Table:
    shown = Table("model", "data", "longest", "FlexSP / hgc", "step s")
    for row in rows:
        if row["kind"] == "beyond":
            shown.add_row(row["model"], row["data"], f"{row['limit_k']}K", f"{row['gain']:.2f}", f"{row['step_s']:.1f}")
    return shown

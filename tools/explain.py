"""``hgc explain``: why a compiled program's plan is as it is."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hgc import compiler, records
from hgc.backends import torchrun
from hgc.backends.torchrun.folder import CLUSTER, PLAN
from hgc.cluster import Cluster
from hgc.errors import ArtifactError, HgcError
from hgc.explanation import Explanation
from hgc.passes.sharding.search.judged import Judged, in_words
from hgc.plan import Plan
from hgc.tools.console import say, stage
from hgc.tools.simulate import find_cluster, traced_again


def explain_command(request: argparse.Namespace) -> int:
    """Print words and table, draw the picture, write the numbers if asked to."""
    folder = Path(request.folder)
    torchrun.read_manifest(folder)
    cluster = find_cluster(request.cluster) if request.cluster else _own_cluster(folder)
    plan = Plan.load(folder / PLAN)
    sys.path.insert(0, str(Path.cwd()))
    with stage("trace the model"):
        traced = traced_again(folder, request.model)
    with stage("simulate and search"):
        found = compiler.explain(traced, plan, cluster)
    say(f"\n{found}")
    for note in torchrun.notes(folder):
        say(f"! {note}", "yellow")
    picture = request.picture or folder / "explain.svg"
    found.draw(picture)
    say(f"\nwrote {picture}: throughput over memory")
    if request.json:
        records.write_text(request.json, records.to_text(numbers(found)), "JSON file", HgcError)
        say(f"wrote {request.json}")
    return 0


def _own_cluster(folder: Path) -> Cluster:
    """The one that the folder was compiled for."""
    if not (folder / CLUSTER).is_file():
        raise ArtifactError(f"{str(folder)!r} does not say for which cluster it was compiled; give --cluster, or compile the model again")
    return Cluster.load(folder / CLUSTER)


def numbers(found: Explanation) -> dict[str, object]:
    """What was simulated and searched, for other programs."""
    settings = {"budgets": found.budgets, "batches": found.batches}
    return {
        "plan": in_words(found.plan),
        "step_s": found.step_s,
        "memory_bytes": int(found.simulation.peak_bytes),
        "batch": found.batch,
        "parts": records.encode(found.simulation.parts),
        "lower_bound_s": found.searched.outcome.lower_bound_s if found.searched else None,
        "gap": found.searched.outcome.gap if found.searched else None,
        "faster": [records.encode(each) for each in found.faster],
        "alternatives": [
            {"part": each.part, "values": list(each.values)} | _judged(each.found, each.why_not) for each in found.alternatives
        ],
        **{
            name: [{"batch": each.batch, "memory_bytes": each.memory_bytes} | _judged(each.found, each.why_not) for each in found_there]
            for name, found_there in settings.items()
        },
        "seen": [_judged(each, "") for each in found.seen],
    }


def _judged(judged: Judged | None, why_not: str) -> dict[str, object]:
    if judged is None:
        return {"why_not": why_not}
    return {"found": in_words(judged.plan), "step_s": judged.step_s, "plan_bytes": judged.memory_bytes, "fits": judged.fits}

"""``hgc simulate``: what a compiled program would take on a cluster, on any machine."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from hgc import compiler
from hgc.backends import torchrun
from hgc.backends.parity import reference
from hgc.backends.simulator import Options
from hgc.backends.torchrun.folder import PLAN
from hgc.cluster import Cluster
from hgc.errors import ArtifactError, ClusterError, HgcError
from hgc.ir.hashing import program_hash
from hgc.ir.program import Program
from hgc.plan import Plan
from hgc.tools import models
from hgc.tools.console import say, stage
from hgc.tracing import trace


def simulate_command(request: argparse.Namespace) -> int:
    """Print the table, write trace and picture if asked to."""
    cluster = find_cluster(request.cluster)
    folder = Path(request.folder)
    torchrun.read_manifest(folder)
    plan = Plan.load(folder / PLAN)
    sys.path.insert(0, str(Path.cwd()))
    with stage("trace the model"):
        traced = traced_again(folder, request.model)
    sizes = _sizes(traced, request)
    with stage("simulate"):
        found = compiler.simulate(traced, plan, cluster, sizes, Options(optimizer=request.optimizer))
    say(f"\n{found}")
    for note in torchrun.notes(folder):
        say(f"! {note}", "yellow")
    if request.trace:
        found.save_trace(request.trace)
        say(f"wrote {request.trace}: open it at https://ui.perfetto.dev")
    if request.picture:
        found.draw(request.picture)
        say(f"wrote {request.picture}")
    return 0


def find_cluster(text: str) -> Cluster:
    """A cluster file, or a preset with the number of nodes behind a colon (``a100-80:8``; one if left out)."""
    if text.endswith(".json") or Path(text).is_file():
        return Cluster.load(text)
    match = re.fullmatch(r"([^:]+)(?::(\d+))?", text)
    if match is None:
        raise ClusterError(f"the cluster is {text!r}; give a JSON file, or a preset and its nodes such as 'a100-80:8'")
    return Cluster.preset(match[1], nodes=int(match[2] or 1))


def traced_again(folder: Path, model: str | None) -> Program:
    """The program of the model that the folder was made from, which it keeps for ``hgc verify``."""
    if model:
        module, inputs = models.load(model, 8, 64)
        traced = trace(module, inputs)
    else:
        found = reference.load(folder)
        traced = trace(found.model, {**found.inputs, **found.constants}, loss=found.loss)
    expected = torchrun.read_manifest(folder).program_hash
    if program_hash(traced) != expected:
        raise ArtifactError(f"the model is not the one that {str(folder)!r} was compiled from (program {expected[:12]}); compile it again")
    return traced


def _sizes(traced: Program, request: argparse.Namespace) -> Mapping[str, float]:
    """Sizes by symbol, from options by meaning."""
    wanted = {"batch": request.batch_size, "sequence": request.sequence_length}
    sizes: dict[str, float] = {}
    for meaning, number in wanted.items():
        symbols = [symbol.name for symbol, found in traced.symbols.items() if found.meaning == meaning]
        if number is not None and not symbols:
            raise HgcError(f"the program has no size that means {meaning}; leave it out")
        sizes.update(dict.fromkeys(symbols, float(number)) if number is not None else {})
    return sizes

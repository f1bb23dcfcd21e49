"""One rank of ``hgc bench local``: profiles the machines of the job, then times emitted programs on them and counts what leaves each node.

``torchrun ... -m hgc.tools.bench.local_worker FOLDER``
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hgc import runtime
from hgc.backends import torchrun
from hgc.runtime.mesh import leave
from hgc.tools.bench.job import read_cases, write_results
from hgc.tools.bench.overhead_models import MODELS, Size, global_batch
from hgc.tools.profile import fit, worker

CLUSTER = "cluster.json"
NETWORKS = Path("/sys/class/net")


@dataclass(frozen=True)
class Case:
    """An emitted program and how often it steps."""

    model: str
    strategy: str
    size: Size
    folder: str
    warmup: int
    steps: int


@dataclass(frozen=True)
class Steps:
    """Seconds of each step (of the slowest rank), and bytes that all nodes together sent to others in one step, headers included."""

    seconds: tuple[float, ...]
    sent_bytes: float


def measure(case: Case) -> Steps:
    """Train for a few steps: forward, backward, gradients summed, AdamW."""
    model, plan = torchrun.load_model(Path(case.folder))
    trainer = runtime.make_trainer(model, plan, state=MODELS[case.model](case.size).state_dict(), device="cpu")
    optimizer = torch.optim.AdamW(list(trainer.parameters()), lr=1e-3)
    taken: list[float] = []
    before = 0.0
    for index in range(case.warmup + case.steps):
        if index == case.warmup:
            before = _sent_bytes()
        batch = global_batch(case.size, index)
        dist.barrier()
        start = time.perf_counter()
        trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        taken.append(time.perf_counter() - start)
    sent = _sent_bytes() - before
    return Steps(tuple(taken[case.warmup :]), sent / case.steps)


def _sent_bytes() -> float:
    """Bytes that left all nodes so far, by the counters of their network interfaces; the same on every rank."""
    dist.barrier()
    first_of_node = os.environ.get("LOCAL_RANK", "0") == "0"
    cards = [card for card in NETWORKS.iterdir() if card.name != "lo"] if first_of_node and NETWORKS.is_dir() else []
    counted = sum(int((card / "statistics" / "tx_bytes").read_text()) for card in cards)
    total = torch.tensor(float(counted), dtype=torch.float64)
    dist.all_reduce(total)
    return float(total)


def main(folder: str) -> None:
    """Profile, then work through the cases of a folder, and write what was found next to them."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    target = Path(folder)
    measured = worker.measure()
    if dist.get_rank() == 0:
        cluster, _ = fit.cluster(measured)
        cluster.save(target / CLUSTER)
    found = [measure(case) for case in read_cases(target, Case)]
    if dist.get_rank() == 0:
        write_results(target, found)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

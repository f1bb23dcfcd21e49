"""One rank of ``hgc bench overhead``: an emitted program and its baseline, in one process, step by step in turn.

``torchrun --nproc-per-node N -m hgc.tools.bench.overhead_worker FOLDER``
"""

from __future__ import annotations

import gc
import math
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hgc import runtime
from hgc.backends import torchrun
from hgc.passes.sharding.plan_text import PlanText
from hgc.plan import Plan
from hgc.runtime.mesh import leave
from hgc.strategy import Strategy
from hgc.tools.bench import overhead_baselines as baselines
from hgc.tools.bench import overhead_pipeline
from hgc.tools.bench.job import read_cases, write_results
from hgc.tools.bench.overhead_models import MODELS, Batch, Size, global_batch
from hgc.tools.bench.overhead_ratios import Pairs

Step = Callable[[Batch], Tensor]


@dataclass(frozen=True)
class Case:
    """One comparison: a model, the strategy of both sides, and the folder of the emitted program.

    ``compiled``: the emitted program with its blocks through torch.compile, against itself without.
    """

    model: str
    strategy: str
    size: Size
    folder: str
    warmup: int
    pairs: int
    compiled: bool = False


def compare(case: Case) -> Pairs:
    """Train both sides on the same batches from the same weights, the order swapped from pair to pair."""
    strategy = PlanText.parse(case.strategy).strategy
    emitted, baseline = _emitted(case, case.compiled), _emitted(case, False) if case.compiled else _baseline(case, strategy)
    taken: dict[Step, list[tuple[float, float]]] = {emitted: [], baseline: []}
    worst = 0.0
    gc.collect()
    gc.disable()  # a collection would fall to whichever side is at work
    for index in range(case.warmup + case.pairs):
        batch = global_batch(case.size, index)
        losses: dict[Step, Tensor] = {}
        for step in (emitted, baseline) if index % 2 == 0 else (baseline, emitted):
            losses[step] = _timed(step, batch, taken[step])
        mine = float(losses[emitted])
        theirs = float(losses[baseline]) if case.compiled else _mean_over_ranks(losses[baseline])
        difference = abs(mine - theirs) / abs(theirs)
        worst = max(worst, difference if math.isfinite(difference) else sys.float_info.max)
    gc.enable()
    kept = {step: times[case.warmup :] for step, times in taken.items()}
    return Pairs(
        tuple(wall for wall, _ in kept[emitted]),
        tuple(wall for wall, _ in kept[baseline]),
        _sum_over_ranks([cpu for _, cpu in kept[emitted]]),
        _sum_over_ranks([cpu for _, cpu in kept[baseline]]),
        worst,
    )


def _timed(step: Step, batch: Batch, into: list[tuple[float, float]]) -> Tensor:
    dist.barrier()
    start, cpu = time.perf_counter(), time.process_time()
    loss = step(batch)
    cpu = time.process_time() - cpu
    dist.barrier()
    into.append((time.perf_counter() - start, cpu))
    return loss


def _emitted(case: Case, compiled: bool) -> Step:
    model, plan = torchrun.load_model(Path(case.folder))
    state = MODELS[case.model](case.size).state_dict()
    trainer = runtime.make_trainer(model, plan, state=state, device="cpu", compile_blocks=compiled)
    optimizer = baselines.make_optimizer(list(trainer.parameters()))

    def step(batch: Batch) -> Tensor:
        loss = trainer.step(batch)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _baseline(case: Case, strategy: Strategy) -> Step:
    model, plan = MODELS[case.model](case.size), Plan.load(Path(case.folder) / "plan.json")
    loss_and_backward, module = overhead_pipeline.by_hand(model, plan) if plan.stages else baselines.by_hand(model, strategy)
    optimizer = baselines.make_optimizer(list(module.parameters()))
    rank = 0 if plan.stages else dist.get_rank()  # a pipeline's first stage takes all rows

    def step(batch: Batch) -> Tensor:
        loss = loss_and_backward(baselines.local_rows(batch, strategy, rank))
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def _mean_over_ranks(loss: Tensor) -> float:
    """Hand-written programs return the mean over a rank's rows; every rank has equally many."""
    total = (loss.full_tensor() if isinstance(loss, DTensor) else loss).clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def _sum_over_ranks(values: list[float]) -> tuple[float, ...]:
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return tuple(float(value) for value in total)


def main(folder: str) -> None:
    """Work through the cases of a folder and write the results next to them."""
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own notes on DDP and DTensor, once for each rank
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = []
    for case in read_cases(Path(folder), Case):
        results.append(compare(case))
        if dist.get_rank() == 0:
            print(f"{case.model} {case.strategy}", flush=True)
    if dist.get_rank() == 0:
        write_results(Path(folder), results)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(sys.argv[1])

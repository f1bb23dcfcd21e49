"""What would let a plan fit where none does: more memory, more devices, a smaller batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hgc.cluster import Cluster
from hgc.ir.program import Program
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.partition import best_cuts
from hgc.passes.sharding.search.pipeline import Pipeline, Stages
from hgc.passes.sharding.search.problem import caps

Problems = Callable[[Program, Cluster], Iterable[Pipeline]]
"""The problems of a program on a cluster, of strategies whose graphs are known."""
_STEP = 1.5
_NEAR = 1.01
"""The least memory that would do is found within this factor."""
_MOST_LARGER = 64
"""Clusters are tried up to this many times as large."""


def fits(problem: Pipeline) -> bool:
    """Is there a cut and a strategy for each block that fit, however slow?"""
    return best_cuts(problem, Stages(problem, lightest)) is not None


def lightest(problem: Pipeline, stage: int, start: int, end: int) -> tuple[tuple[int, ...], float] | None:
    """Strategies of a stage that fit, if any do: the lightest of each block, for each ``passing`` that the largest may have."""
    chain = problem.chain(stage, start, end)
    for cap in caps(chain):
        memory = np.where(np.isfinite(chain.time_s) & (chain.passing <= cap), chain.memory, np.inf)
        if memory.min(axis=1).sum() + cap <= chain.limit:
            return tuple(map(int, memory.argmin(axis=1))), 0.0
    return None


def least_share(problems: Sequence[Pipeline]) -> float | None:
    """How many times the memory of ``problems`` would be enough for one of them, within 1 %; ``None`` if none can be at all."""
    usable = [problem for problem in problems if bool(np.isfinite(problem.micro_s).any(axis=1).all())]
    if not usable:
        return None
    high = 1.0
    while not _any_fits(usable, high):
        high *= _STEP
    low = high / _STEP if high > 1 else 0.0
    while low and high / low > _NEAR:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if _any_fits(usable, middle) else (middle, high)
    return high


def _any_fits(problems: Sequence[Pipeline], share: float) -> bool:
    return any(fits(replace(problem, limit=problem.limit * share)) for problem in problems)


@dataclass(frozen=True)
class Remedies:
    """``share``: of the memory there is; ``devices``, ``batch``: the nearest that do, ``None`` if none of those tried does."""

    share: float | None
    devices: int | None
    batch: int | None


def remedies(program: Program, cluster: Cluster, memory_share: float, problems: Problems) -> Remedies:
    """``memory_share``: how much of the devices' memory the numbers may fill."""

    def fit(other: Program, larger: Cluster) -> bool:
        return any(fits(replace(problem, limit=problem.limit * memory_share)) for problem in problems(other, larger))

    needed = least_share([replace(problem, limit=problem.limit * memory_share) for problem in problems(program, cluster)])
    devices = next((larger.devices for larger in larger_clusters(cluster) if fit(program, larger)), None)
    batch = next((rows for rows, smaller in smaller_batches(program) if fit(smaller, cluster)), None)
    return Remedies(needed, devices, batch)


def nothing_fits(what: str, found: Remedies, blocks: ProgramBlocks) -> str:
    """The sentence of the error. ``what``: "no plan fits llama"."""
    cluster = blocks.cluster
    least = cluster.least_memory_bytes
    text = f"{what} into {least / 2**20:.4g} MiB on each of {cluster.devices} device{'s' * (cluster.devices > 1)}"
    if found.share is None:
        return f"{text}, nor into more of it, because the batch of {blocks.batch} does not divide"
    needed = found.share * blocks.limit_bytes + least - blocks.limit_bytes
    ways = [f"about {needed / 2**20:.4g} MiB"]
    ways += [f"{found.devices} such devices"] if found.devices else []
    ways += [f"a batch of {found.batch}"] if found.batch else []
    return f"{text}; {', '.join(ways[:-1])}{' or ' if ways[1:] else ''}{ways[-1]} would do"


def larger_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """With 2, 4, 8 .. times the devices: more nodes, or of a single node more of its devices."""
    factor = 2
    while factor <= _MOST_LARGER:
        if cluster.link is None:
            (node,) = cluster.nodes
            yield replace(cluster, nodes=(replace(node, count=node.count * factor),))
        else:
            yield replace(cluster, nodes=cluster.nodes * factor)
        factor *= 2


def smaller_batches(program: Program) -> Iterator[tuple[int, Program]]:
    """Half the batch, a quarter .. as far as the model was traced for."""
    divisor = 2
    while (smaller := resized(program, 1 / divisor)) is not None:
        rows = [found.hint for found in smaller.symbols.values() if found.meaning == "batch"]
        yield rows[0], smaller
        divisor *= 2


def resized(program: Program, factor: float) -> Program | None:
    """With ``factor`` times the example's batch; ``None`` if that is no whole number, outside of what was traced, or there is no batch."""
    batches = {symbol: found.hint * factor for symbol, found in program.symbols.items() if found.meaning == "batch"}
    low_enough = all(program.symbols[symbol].low <= rows and rows == int(rows) for symbol, rows in batches.items())
    high = [(program.symbols[symbol].high, rows) for symbol, rows in batches.items()]
    if not batches or not low_enough or any(most is not None and rows > most for most, rows in high):
        return None
    other = program.copy()
    for symbol, rows in batches.items():
        other.symbols[symbol] = replace(program.symbols[symbol], hint=int(rows))
    return other

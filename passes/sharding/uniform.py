"""Choose one strategy for all blocks by a simple price: the planner behind ``plan="auto"`` until the hybrid search replaces it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import sympy

from hgc.cluster import Cluster, Link
from hgc.errors import HgcError, PlanError, ShardingError
from hgc.ir.placement import Shard
from hgc.ir.program import Program
from hgc.ir.value import Value, info
from hgc.ir.verifier import planning_hints
from hgc.passes.base import Planner
from hgc.passes.sharding.data_parallel import data_layout
from hgc.passes.sharding.tensor_parallel import tensor_layout
from hgc.plan import Plan, Prediction
from hgc.strategy import Strategy

_OPTIMIZER_COPIES = 2
"""Adam keeps two numbers for each parameter."""


@dataclass(frozen=True)
class Candidate:
    """A strategy with its price; ``refused`` says why it cannot be used."""

    strategy: Strategy
    communication_s: float = 0.0
    communication_bytes: int = 0
    memory_bytes: int = 0
    refused: str = ""


@dataclass(frozen=True)
class UniformPlanner(Planner):
    """Cheapest communication among the strategies that fit in memory.

    The price of a step, for each device, ring collectives over the slowest link that the group crosses:

    * ``dp``: one all-reduce of the local parameters; with ``zero`` 3 half as much again (two gathers and a scatter);
    * ``tp``: four all-reduces of the layer's activations in each block that is split (two forward, two backward).

    Memory is parameters, gradients and two optimizer numbers, divided by the ranks that shard them, plus the activations of every
    block. Computation is the same for all candidates and left out.
    """

    name: ClassVar[str] = "uniform"

    def run(self, program: Program, cluster: Cluster) -> Plan:
        """Raises :class:`~hgc.errors.PlanError` with the nearest candidate if none can be used."""
        candidates = self.candidates(program, cluster)
        usable = [c for c in candidates if not c.refused]
        if not usable:
            reasons = "; ".join(dict.fromkeys(f"{c.strategy}: {c.refused}" for c in candidates[:4]))
            raise PlanError(f"no strategy runs {program.name} on {cluster.devices} devices ({reasons})")
        best = min(usable, key=lambda c: (c.communication_s, c.strategy.zero, c.strategy.tp))
        predicted = Prediction(
            memory_bytes=best.memory_bytes, communication_bytes=best.communication_bytes, basis="uniform planner, ring collectives"
        )
        refused = tuple(f"not {c.strategy}: {c.refused}" for c in candidates if c.refused)
        return Plan(best.strategy, predicted=predicted, notes=(f"chosen among {len(usable)} strategies by least communication", *refused))

    def candidates(self, program: Program, cluster: Cluster) -> list[Candidate]:
        """Every ``dp`` x ``tp`` x ``zero`` of the devices, priced or refused."""
        devices, found = cluster.devices, []
        for tp in (n for n in range(1, devices + 1) if devices % n == 0):
            dp = devices // tp
            for zero in (0, 3) if dp > 1 else (0,):
                found.append(self._price(program, cluster, Strategy(dp=dp, tp=tp, zero=zero)))
        return found

    def _price(self, program: Program, cluster: Cluster, wanted: Strategy) -> Candidate:
        try:
            strategy, split = fitted(program, wanted)
        except HgcError as error:
            return Candidate(wanted, refused=str(error))
        bandwidth = _bandwidth(cluster, strategy)
        parameters = _parameter_bytes(program, split, strategy.tp)
        activations, layers = _activations(program, strategy)
        sent = {
            "dp": 2 * (1.5 if strategy.zero else 1) * parameters * (strategy.dp - 1) / strategy.dp,
            "tp": 4 * 2 * activations * layers * (strategy.tp - 1) / strategy.tp,
        }
        memory = int(parameters * (2 + _OPTIMIZER_COPIES) / (strategy.dp if strategy.zero else 1) + activations * layers * 16 / strategy.tp)
        limit = cluster.nodes[0].device.memory_bytes
        refused = f"needs about {memory >> 20} MiB on each device, which has {limit >> 20}" if memory > limit else ""
        seconds = sum(size / bandwidth[axis] for axis, size in sent.items())
        return Candidate(strategy, seconds, int(sum(sent.values())), memory, refused)


def fitted(program: Program, strategy: Strategy) -> tuple[Strategy, dict[str, Shard]]:
    """The strategy with sequence parallelism only where the example's sequence divides, and the state it splits.

    Raises :class:`~hgc.errors.ShardingError` if the batch or a layer does not divide.
    """
    split: dict[str, Shard] = {}
    if strategy.dp > 1:
        data_layout(program, "dp", strategy.dp)
        for symbol, found in program.symbols.items():
            if found.meaning == "batch" and found.hint % strategy.dp:
                raise ShardingError(f"the example's batch ({symbol}) is {found.hint}, which dp={strategy.dp} does not divide")
    if strategy.tp > 1:
        layout, _ = tensor_layout(program, "tp", strategy.tp, planning_hints(program, strategy.devices))
        split = {name: p for name, p in layout.state.items() if isinstance(p, Shard)}
        lengths = [found.hint for found in program.symbols.values() if found.meaning != "batch"]
        if any(length % strategy.tp for length in lengths):
            strategy = replace(strategy, sequence_parallel=False)
    return strategy, split


def _bandwidth(cluster: Cluster, strategy: Strategy) -> dict[str, float]:
    """Bytes a second for each axis: ``tp`` ranks are neighbours, ``dp`` groups span the cluster."""

    def slowest(spans_nodes: bool) -> float:
        links: list[Link] = [node.link for node in cluster.nodes]
        if spans_nodes and cluster.link is not None:
            links.append(cluster.link)
        return min(link.bytes_per_s for link in links)

    smallest = min(node.count for node in cluster.nodes)
    return {"dp": slowest(strategy.devices > smallest), "tp": slowest(strategy.tp > smallest)}


def _parameter_bytes(program: Program, split: dict[str, Shard], tp: int) -> float:
    total = 0.0
    for name, state in program.state.items():
        if state.kind == "parameter":
            total += float(state.value.nbytes) / (tp if name in split else 1)
    return total


def _activations(program: Program, strategy: Strategy) -> tuple[float, int]:
    """Bytes of the widest activation that leaves a block, on one data-parallel rank, and how many blocks there are."""
    hints: dict[sympy.Symbol, int] = program.hints()
    widest, blocks = 0.0, 0
    for block in program.blocks():
        values = info(block.node).value
        assert isinstance(values, tuple)
        sizes = [float(v.nbytes.subs(hints)) for v in values if isinstance(v, Value) and v.requires_grad]
        widest, blocks = max([widest, *sizes]), blocks + 1
    return widest / strategy.dp, blocks

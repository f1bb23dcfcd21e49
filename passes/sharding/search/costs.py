"""What each block of a program costs under each strategy, as numbers for the search; each distinct block is lowered once."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from hgc.cluster import Cluster, Device
from hgc.cost.collectives import Kind, place, time_s
from hgc.cost.execution import EAGER, Execution
from hgc.cost.memory import memory, reserve_of
from hgc.cost.places import axis_places, group_place, slowest_device
from hgc.cost.shares import DATA_AXES
from hgc.cost.stage_time import BlockTime, StageTimes
from hgc.cost.symbolic import Formulas, ProgramCosts
from hgc.cost.traffic import optimizer_bytes, optimizer_s
from hgc.errors import HgcError
from hgc.ir.hashing import structure_hash
from hgc.ir.program import Program
from hgc.ir.value import value
from hgc.passes.sharding.search.crossings import Crossing, crossings
from hgc.passes.sharding.search.pipeline import Arrival, Pipeline
from hgc.passes.sharding.search.problem import Numbers as Seconds
from hgc.passes.sharding.search.space import block_graph
from hgc.passes.sharding.search.switches import carried, exchanges_s, sides
from hgc.passes.sharding.stages import cut
from hgc.plan import Plan, Precision, Stage
from hgc.runtime.reducer import BUCKET_BYTES
from hgc.strategy import Strategy

Measure = Callable[[Program, Plan], tuple[Program, ProgramCosts]]
"""Applies a plan without stages to a single-device program, and finds what the result costs."""
Numbers = tuple[float, float, float, float, float]
"""Of a block: time of a micro-batch, what the last one takes longer, state, what a micro-batch saves, passing memory."""
_IMPOSSIBLE: Numbers = (math.inf, 0.0, 0.0, 0.0, 0.0)
_ACTION_S = 1e-4
"""Assumption: what an action of the schedule costs on the host."""
_GROUPS = 5
"""Communicators of a rank at most: one for each axis, and the world."""


@dataclass(frozen=True, eq=False)
class _Lowered:
    """A block lowered by the axes that decide its graph (all but ``dp``, which only divides the batch), with its costs."""

    program: Program
    costs: ProgramCosts
    body: str
    optimizer_bytes: float
    precision: Precision
    execution: Execution = EAGER
    _times: dict[str, StageTimes] = field(default_factory=dict)
    _memory: dict[str, Formulas] = field(default_factory=dict)

    def times(self, recompute: str, sizes: Mapping[str, float], device: Device, cluster: Cluster, strategy: Strategy) -> BlockTime:
        key = recompute if self.costs.repeated else "none"
        if key not in self._times:
            self._times[key] = StageTimes(self.costs, Strategy(recompute=key), self.precision, self.execution)
        return self._times[key](sizes, device, axis_places(cluster, strategy.mesh))[self.body]

    def memory(self, recompute: str, sizes: Mapping[str, float]) -> dict[str, float]:
        """Terms of ``hgc.cost.memory`` for one micro-batch, without ZeRO."""
        key = recompute if self.costs.repeated else "none"
        if key not in self._memory:
            plan = Plan(Strategy(recompute=key), precision=self.precision)
            terms = memory(self.program, plan, self.costs, execution=self.execution)
            self._memory[key] = Formulas(terms.expressions(), self.program.symbols)
        return {name: float(amount) for name, amount in self._memory[key]({name: np.asarray(size) for name, size in sizes.items()}).items()}


@dataclass(frozen=True, eq=False)
class ProgramBlocks:
    """The blocks of a traced program on a cluster.

    A strategy's numbers come from the block lowered without ``dp`` and ZeRO, for a share of the batch; what ZeRO shards and sends follows
    from the block's parameters (the table in docs/design/costs.md). On the CPU that is exposed, on a GPU only what takes longer than the
    compute that it runs beside. Values travel once a micro-batch each way to each stage that reads them. The simulator has the last word
    on plans. ``execution``: as the simulator's.
    """

    program: Program
    cluster: Cluster
    measure: Measure
    precision: Precision = field(default_factory=Precision)
    execution: Execution = EAGER
    refused: dict[str, str] = field(default_factory=dict)
    """Strategy (as lowered) -> why some block cannot have it."""
    _lowered: dict[tuple[str, Strategy], _Lowered | None] = field(default_factory=dict)
    _numbers: dict[tuple[int, Strategy, int, Device], Numbers] = field(default_factory=dict)
    _switches: dict[tuple[tuple[Strategy, ...], int], Seconds] = field(default_factory=dict)

    @cached_property
    def parts(self) -> tuple[Program, ...]:
        """Each block as a program of its own."""
        count = sum(1 for _ in self.program.blocks())
        return cut(self.program, Plan(stages=tuple(Stage(1, rank, Strategy()) for rank in range(count))))

    @cached_property
    def hashes(self) -> tuple[str, ...]:
        return tuple(structure_hash(part) for part in self.parts)

    @cached_property
    def kinds(self) -> tuple[int, ...]:
        """Of each block: which block is the first that does the same."""
        return tuple(self.hashes.index(each) for each in self.hashes)

    @cached_property
    def batch(self) -> int:
        """Rows of the global batch; 1 if the program has no batch."""
        found = [symbol.hint for symbol in self.program.symbols.values() if symbol.meaning == "batch"]
        return math.gcd(*found) if found else 1

    @cached_property
    def device(self) -> Device:
        return slowest_device(self.cluster, range(self.cluster.devices))

    @cached_property
    def limit_bytes(self) -> float:
        """Of the smallest device, for tensors; the allocator of a GPU loses a share beside them."""
        return min(self._limit_of(node.device) for node in self.cluster.nodes)

    def _limit_of(self, device: Device) -> float:
        reserve = reserve_of(device)
        lost = self.execution.fragmentation if device.type == "cuda" else 0.0
        return float(device.memory_bytes - reserve.context_bytes - _GROUPS * reserve.communicator_bytes) / (1 + lost)

    def elsewhere(self, program: Program | None = None, cluster: Cluster | None = None) -> ProgramBlocks:
        """The same blocks at other example sizes, or on other devices; what was lowered and measured serves both."""
        fresh: dict[str, Any] = {"_numbers": {}, "_switches": {}}
        return replace(self, program=program or self.program, cluster=cluster or self.cluster, **fresh)

    def usable(self, strategies: Sequence[Strategy]) -> tuple[Strategy, ...]:
        """Those under which every block can be lowered and the batch divides."""
        return tuple(
            strategy
            for strategy in strategies
            if self.batch % strategy.dp == 0 and all(self._block(kind, strategy) is not None for kind in sorted(set(self.kinds)))
        )

    def pipeline(self, strategies: Sequence[Strategy], stages: int, micro_batches: int, virtual: int = 1) -> Pipeline:
        """The search problem of so many stages, each of ``strategy.devices`` ranks, in ``virtual`` parts that take turns.

        What the last micro-batch takes longer than others is divided by the stages: those behind have it while those before still work.
        """
        places = self._places(stages)
        tables = {device: self._table(strategies, micro_batches, device) for device in dict.fromkeys(device for device, _ in places)}
        paces = {device: _pace(table, min(tables.values(), key=_typical_s)) for device, table in tables.items()}
        numbers = min(tables.values(), key=_typical_s).copy()
        least = min(limit for _, limit in places)
        arrivals = self._arrivals(strategies, stages, micro_batches, virtual)
        for each in arrivals:
            for reader in each.readers:
                numbers[reader, :, 3] = np.maximum(numbers[reader, :, 3] - each.saved, 0.0)
        return Pipeline(
            numbers[:, :, 0],
            numbers[:, :, 1] / stages,
            numbers[:, :, 2],
            numbers[:, :, 3],
            numbers[:, :, 4],
            self._switches_s(tuple(strategies), micro_batches),
            stages,
            micro_batches,
            least,
            self.kinds,
            virtual,
            arrivals,
            tuple(paces[device] for device, _ in places) if len(set(paces.values())) > 1 else (),
            tuple(limit / least for _, limit in places) if any(limit > least for _, limit in places) else (),
        )

    def _places(self, stages: int) -> list[tuple[Device, float]]:
        """Of each stage's ranks, which follow one another: the slowest device, and the memory of the smallest one."""
        ranks = self.cluster.devices // stages
        spans = [range(stage * ranks, (stage + 1) * ranks) for stage in range(stages)]
        return [(slowest_device(self.cluster, span), min(map(self._limit_of, self._devices(span)))) for span in spans]

    def _devices(self, ranks: Iterable[int]) -> list[Device]:
        return [self.cluster.nodes[node].device for node in sorted({self.cluster.owners[rank] for rank in ranks})]

    def _table(self, strategies: Sequence[Strategy], micro_batches: int, device: Device) -> Seconds:
        """[blocks, strategies, :data:`Numbers`] on devices of one kind."""
        table = {kind: np.array([self._of(kind, strategy, micro_batches, device) for strategy in strategies]) for kind in set(self.kinds)}
        return np.array([table[kind] for kind in self.kinds])

    def _block(self, kind: int, strategy: Strategy) -> _Lowered | None:
        graph = block_graph(strategy)
        key = self.hashes[kind], graph
        if key not in self._lowered:
            try:
                self._lowered[key] = self._lower(self.parts[kind], graph)
            except HgcError as error:
                self.refused.setdefault(str(graph), str(error))
                self._lowered[key] = None
        return self._lowered[key]

    def _lower(self, part: Program, graph: Strategy) -> _Lowered:
        lowered, costs = self.measure(part, Plan(graph, precision=self.precision))
        own = [block.body for block in lowered.blocks()][-1]  # what comes from the batch alone is computed in front of it
        return _Lowered(lowered, costs, own, float(optimizer_bytes(lowered, graph, self.precision)), self.precision, self.execution)

    def _of(self, kind: int, strategy: Strategy, micro_batches: int, device: Device) -> Numbers:
        key = kind, strategy, micro_batches, device
        if key not in self._numbers:
            divides = self.batch % (strategy.dp * micro_batches) == 0
            self._numbers[key] = self._measured(kind, strategy, micro_batches, device) if divides else _IMPOSSIBLE
        return self._numbers[key]

    def _measured(self, kind: int, strategy: Strategy, micro_batches: int, device: Device) -> Numbers:
        block = self._block(kind, strategy)
        if block is None:
            return _IMPOSSIBLE
        sizes = self._sizes(strategy.dp * micro_batches)
        time = block.times(strategy.recompute, sizes, device, self.cluster, strategy)
        terms = block.memory(strategy.recompute, sizes)
        ranks = math.prod(getattr(strategy, axis) for axis in DATA_AXES)
        state = _State(terms, ranks, strategy.zero, micro_batches)
        every_s, last_s = self._traffic_s(state, time, strategy)
        update_s = optimizer_s(block.optimizer_bytes / state.optimizer_parts, device)
        adding_s = optimizer_s(3 * terms["gradients"], device) if micro_batches > 1 else 0.0
        return (
            time.forward_s + time.backward_s + every_s + adding_s,
            last_s + update_s - adding_s,
            state.bytes,
            terms["activations"],
            max(terms["logits"], terms["workspace"] + terms["recomputed"]) + state.passing_bytes,
        )

    def _sizes(self, parts: int) -> dict[str, float]:
        found = self.program.symbols.items()
        return {symbol.name: each.hint / (parts if each.meaning == "batch" else 1) for symbol, each in found}

    def _traffic_s(self, state: _State, time: BlockTime, strategy: Strategy) -> tuple[float, float]:
        """Exposed seconds of gradients and ZeRO, in each micro-batch and in the last one."""
        axes = tuple(axis for axis in strategy.mesh if axis in DATA_AXES)
        if not axes:
            return 0.0, 0.0
        where = group_place(self.cluster, strategy.mesh, axes, 0)

        def seconds(kind: Kind, payload_bytes: float, beside_s: float, *, is_hidden: bool) -> float:
            taken_s = time_s(kind, payload_bytes, where) if payload_bytes else 0.0
            return max(taken_s - beside_s, 0.0) if is_hidden else taken_s

        is_gpu = self.device.type == "cuda"
        if strategy.zero == 0:
            return 0.0, seconds("all_reduce", state.gradients, time.backward_s, is_hidden=True)
        gather_s = seconds("all_gather", state.parameters, time.forward_s, is_hidden=is_gpu)
        again_s = seconds("all_gather", state.parameters, 0.0, is_hidden=False) if strategy.zero == 3 else 0.0
        scatter_s = seconds("reduce_scatter", state.gradients, 0.0, is_hidden=False)
        backward_s = max(again_s + scatter_s - (time.backward_s if is_gpu else 0.0), 0.0)
        if strategy.zero == 1:
            return 0.0, gather_s + backward_s
        return (backward_s, gather_s) if strategy.zero == 2 else (gather_s + backward_s, 0.0)

    # -- what lies between blocks -------------------------------------------------------------------------------------------------------

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        return crossings(self.parts)

    @cached_property
    def _bytes(self) -> tuple[Formulas, dict[str, str]]:
        """Sizes of what crosses, each distinct one once: formulas by name, and the name of each size."""
        names = {str(each.nbytes): f"v{number}" for number, each in enumerate(self.crossings)}
        return Formulas({names[str(each.nbytes)]: each.nbytes for each in self.crossings}, self.program.symbols), names

    def _crossing_bytes(self, strategies: Sequence[Strategy], micro_batches: int) -> dict[str, Seconds]:
        """Size -> [strategies], what of it a rank has of one micro-batch."""
        formulas, names = self._bytes
        found = [formulas({name: np.asarray(size) for name, size in self._sizes(s.dp * micro_batches).items()}) for s in strategies]
        shares = np.array([s.cp * s.sp * (s.tp if s.sequence_parallel else 1) for s in strategies])
        return {size: np.array([float(each[name]) for each in found]) / shares for size, name in names.items()}

    def _arrivals(self, strategies: Sequence[Strategy], stages: int, micro_batches: int, virtual: int) -> tuple[Arrival, ...]:
        """Parts that take turns get ``virtual`` messages, and have more micro-batches in flight than they wait for: where senders need not
        wait, nobody does."""
        bytes_ = self._crossing_bytes(strategies, micro_batches)
        often = virtual if self.execution.sends_block or virtual == 1 else 0
        where = place(self.cluster, (0, self.cluster.devices // stages)) if stages > 1 else None
        known: dict[tuple[str, bool, bool], Arrival] = {}
        found = []
        for each in self.crossings:
            is_shared = len(each.readers) > 1
            key = str(each.nbytes), each.has_gradient, is_shared
            if key not in known:
                held = bytes_[key[0]]
                sent = np.array([time_s("send", amount, where) if where else 0.0 for amount in held.tolist()])
                times = (2 if each.has_gradient else 1) * often
                known[key] = Arrival(0, (), times * sent, held if is_shared else np.zeros_like(held), len(known))
            found.append(replace(known[key], maker=each.maker, readers=each.readers))
        return tuple(found)

    def _switches_s(self, strategies: tuple[Strategy, ...], micro_batches: int) -> Seconds:
        """[strategies, strategies]: a micro-batch that goes on with another strategy on the same ranks, forward and backward.

        Unlike strategies are stages of their own there, and cost the executor two more actions; unlike meshes exchange what crosses.
        """
        if (strategies, micro_batches) not in self._switches:
            self._switches[strategies, micro_batches] = self._switches_measured_s(strategies, micro_batches)
        return self._switches[strategies, micro_batches]

    def _switches_measured_s(self, strategies: Sequence[Strategy], micro_batches: int) -> Seconds:
        usual = max(set(self.kinds), key=self.kinds.count)
        values = [value(node) for node in carried(self.parts[usual])]
        held = [sides(self.parts[usual], block.program if block else None, s) for s in strategies for block in (self._block(usual, s),)]
        sizes = {symbol: known.hint for symbol, known in self.program.symbols.items()}
        bytes_ = [float(each.nbytes.subs(sizes)) / micro_batches for each in values]
        found = 2 * _ACTION_S + exchanges_s(self.cluster, held, [len(each.shape) for each in values], bytes_)
        np.fill_diagonal(found, 0.0)
        return found


def _typical_s(table: Seconds) -> float:
    """A micro-batch of all blocks, in the median over strategies that all of them can have."""
    whole_s = table[:, :, 0].sum(axis=0)
    return float(np.median(whole_s[np.isfinite(whole_s)])) if np.isfinite(whole_s).any() else math.inf


def _pace(table: Seconds, fastest: Seconds) -> float:
    """How many times as long as the fastest devices."""
    return _typical_s(table) / _typical_s(fastest) if math.isfinite(_typical_s(table)) else 1.0


@dataclass(frozen=True)
class _State:
    """Bytes of a block's state on a rank of ``ranks`` that share data, from the memory terms of one that shares none."""

    terms: Mapping[str, float]
    ranks: int
    zero: int
    micro_batches: int

    @property
    def parameters(self) -> float:
        return self.terms["parameters"]

    @property
    def gradients(self) -> float:
        return self.terms["gradients"]

    @property
    def optimizer_parts(self) -> int:
        return self.ranks if self.zero else 1

    @property
    def bytes(self) -> float:
        """With ZeRO 1 and 2 all parameters are whole beside the shares, with 1 also the gradients of all but the last micro-batch."""
        whole = self.terms["parameters"] if self.zero in (1, 2) else 0.0
        summed = self.gradients if self.zero == 1 and self.micro_batches > 1 else 0.0
        held = self.parameters + self.gradients + self.terms["optimizer"] + self.terms["master"]
        return held / self.optimizer_parts + whole + summed + self.terms["buffers"] + self.terms["batch"]

    @property
    def passing_bytes(self) -> float:
        """Gradients on their way; with ZeRO 3 the block's parameters and the next one's."""
        if self.ranks == 1:
            return 0.0
        if not self.zero:
            return min(BUCKET_BYTES, self.gradients)
        return (2 if self.zero == 3 else 0) * self.parameters + 2 * self.gradients

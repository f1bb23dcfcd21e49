"""From lowered stages, plan and cluster to a simulation; see docs/design/simulator.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from hgc.backends.simulator.census import Census
from hgc.backends.simulator.engine import play
from hgc.backends.simulator.memory import device_memory, stage_memory
from hgc.backends.simulator.result import Simulation
from hgc.backends.simulator.stage_steps import StageWork
from hgc.backends.simulator.stages import Sizes, StageProgram, handed, messages
from hgc.backends.simulator.state_steps import accumulation_s, moving_s, optimizer_step
from hgc.backends.simulator.units import Traffic
from hgc.backends.simulator.work import Meeting, Message, Step, Steps, Work
from hgc.cluster import Cluster
from hgc.cost.collectives import Kind, Place, place, time_s
from hgc.cost.execution import EAGER, Execution
from hgc.cost.places import axis_places, group_place, in_step, slowest_device
from hgc.cost.stage_time import BlockTime, StageTimes
from hgc.errors import ClusterError, HgcError
from hgc.plan import Plan
from hgc.schedule import Action, Schedule, in_flight, make
from hgc.schedule import Kind as ActionKind
from hgc.schedule.layout import Edge

_NORM_BYTES = 8


@dataclass(frozen=True)
class Options:
    """What neither program nor plan decides.

    ``optimizer``: as ``hgc.cost.memory`` knows them, or ``"none"``. ``clip``: gradients are scaled to a norm first.
    """

    optimizer: str = "adamw"
    clip: bool = False
    execution: Execution = EAGER


USUAL = Options()
"""AdamW, without clipping, as hgc's runtime does it."""


def simulate(
    stages: Sequence[StageProgram],
    plan: Plan,
    cluster: Cluster,
    sizes: Mapping[str, float] | None = None,
    options: Options = USUAL,
    schedule: Schedule | None = None,
) -> Simulation:
    """Predict one training step.

    Args:
        stages: the plan's stages in order, or the one program of a plan without stages, lowered, with their costs.
        sizes: symbol name -> size of the global batch, for those that differ from the example's; micro-batches divide the batch.
        schedule: in place of the one that the plan names.

    Raises:
        HgcError: a size that no symbol has, an optimizer that is not known.
        ClusterError: the cluster has fewer devices than the plan needs.
        PlanError: the schedule gets stuck.
    """
    return _Simulator(tuple(stages), plan, cluster, sizes or {}, options).run(schedule)


@dataclass(frozen=True)
class _Simulator:
    stages: tuple[StageProgram, ...]
    plan: Plan
    cluster: Cluster
    given: Mapping[str, float]
    options: Options

    def __post_init__(self) -> None:
        count = len(self.plan.strategies)
        if len(self.stages) != count:
            raise HgcError(f"the plan has {count} stages, {len(self.stages)} programs were given; give the program of each stage")
        if self.plan.devices > self.cluster.devices:
            raise ClusterError(f"the plan needs {self.plan.devices} devices, the cluster has {self.cluster.devices}; give a larger one")

    def run(self, schedule: Schedule | None) -> Simulation:
        edges = tuple(self.edges)
        schedule = schedule or make(self.plan.schedule, self.ranks, self.plan.micro_batches, edges)
        steps_of = _ActionSteps(self.work, schedule)
        begin = tuple(self._meeting(stage, found.begins()) for stage, found in enumerate(self.work))
        work = Work(steps_of, self._messages(), tuple(self._end()), self.options.execution.sends_block, begin)
        timeline = play(schedule, work, edges)
        alive = in_flight(schedule)
        memory = stage_memory(self.stages, self.plan, self.cluster, self.sizes, alive, self.options.optimizer, self.options.execution)
        return Simulation(
            step_s=timeline.step_s,
            parts=timeline.mean,
            memory=memory,
            on_devices=device_memory(memory, schedule, alive, self._fragmentation),
            between_nodes_bytes=self._between_nodes(schedule, work, steps_of),
            timeline=timeline,
            devices=self.plan.devices,
            micro_batches=self.plan.micro_batches,
            schedule=self.plan.schedule if self.plan.stages else "",
            notes=tuple(dict.fromkeys(note for stage in self.stages for note in stage.costs.notes)),
        )

    @property
    def _fragmentation(self) -> float:
        """A CPU has no caching allocator."""
        return self.options.execution.fragmentation if self.cluster.device_type == "cuda" else 0.0

    # -- sizes --------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def sizes(self) -> Sizes:
        """Of the global batch."""
        symbols = {symbol: found for stage in self.stages for symbol, found in stage.program.symbols.items()}
        unknown = sorted(set(self.given) - {symbol.name for symbol in symbols})
        if unknown:
            raise HgcError(f"the program has no size {unknown[0]!r}; it has {', '.join(symbol.name for symbol in symbols) or 'none'}")
        return {symbol: float(self.given.get(symbol.name, found.hint)) for symbol, found in symbols.items()}

    @cached_property
    def micro_sizes(self) -> Sizes:
        """Of one micro-batch."""
        batches = {symbol for stage in self.stages for symbol, found in stage.program.symbols.items() if found.meaning == "batch"}
        return {symbol: size / self.plan.micro_batches if symbol in batches else size for symbol, size in self.sizes.items()}

    # -- stages -------------------------------------------------------------------------------------------------------------------------

    @cached_property
    def ranks(self) -> list[range]:
        return [self.plan.ranks(stage) for stage in range(len(self.stages))]

    @cached_property
    def edges(self) -> list[Edge]:
        """Stages follow one another even if nothing but the batch reaches a later one."""
        return sorted(handed(self.stages))

    @cached_property
    def traffic(self) -> list[Traffic]:
        known: dict[tuple[int, str], Traffic] = {}
        for stage, strategy in zip(self.stages, self.plan.strategies, strict=True):
            key = id(stage.program), str(strategy)
            known[key] = known.get(key) or Traffic(stage.program, strategy, self.plan.precision, self.options.execution)
        return [known[id(stage.program), str(strategy)] for stage, strategy in zip(self.stages, self.plan.strategies, strict=True)]

    @cached_property
    def work(self) -> list[StageWork]:
        """Of each stage; equal stages on equal places are compiled and evaluated once."""
        compiled: dict[tuple[int, str], StageTimes] = {}
        evaluated: dict[tuple[int, str, str], dict[str, BlockTime]] = {}
        found = []
        for index, (stage, strategy, traffic) in enumerate(zip(self.stages, self.plan.strategies, self.traffic, strict=True)):
            device = in_step(slowest_device(self.cluster, self.ranks[index]), self.plan.devices)
            places = axis_places(self.cluster, stage.program.mesh, self.ranks[index][0])
            key = id(stage.costs), str(strategy)
            if key not in compiled:
                compiled[key] = StageTimes(stage.costs, strategy, self.plan.precision, self.options.execution)
            situation = (*key, repr((device, places)))
            if situation not in evaluated:
                sizes = {symbol.name: size for symbol, size in self.micro_sizes.items()}
                evaluated[situation] = compiled[key](sizes, device, places)
            blocks = tuple((block.path or block.body, evaluated[situation][block.body]) for block in stage.program.blocks())
            found.append(
                StageWork(
                    blocks=blocks,
                    unit_of=traffic.unit_of,
                    units=traffic.units,
                    buckets=traffic.buckets,
                    zero=strategy.zero if traffic.units else 0,
                    axes=traffic.shares.axes,
                    seconds=_Collectives(self.cluster, stage.program.mesh, self.ranks[index][0]),
                    execution=self.options.execution,
                    runs_ahead=device.type == "cuda",
                    name=f"stage {index}",
                    tensor_ranks=stage.program.mesh.get("tp", 1),
                    accumulation_s=accumulation_s(traffic, device, self.options.execution.fused_accumulation),
                    moving=partial(moving_s, device),
                    unit_s=device.kernels.unit_s,
                )
            )
        return found

    def _messages(self) -> dict[tuple[Edge, str], Message]:
        return messages(self.stages, self.plan, self.cluster, self.micro_sizes, self.options.execution)

    # -- bytes that leave nodes ---------------------------------------------------------------------------------------------------------

    @cached_property
    def census(self) -> Census:
        return Census(self.cluster)

    def _leaving(self, stage: int, steps: Steps) -> float:
        return self.census.steps(steps, self.stages[stage].program.mesh, self.ranks[stage][0])

    def _between_nodes(self, schedule: Schedule, work: Work, steps_of: _ActionSteps) -> float:
        """In one training step, all ranks together."""
        total = sum(meeting.between_nodes_bytes for meeting in (*work.begin, *work.end))
        for ((source, target), way), message in work.messages.items():
            receiver = target if way == "F" else source
            total += schedule.micro_batches * (message.between_nodes_bytes + self._leaving(receiver, message.unpack))
        for stage, ranks in enumerate(self.ranks):
            actions = [action for action in schedule.lists[ranks[0]] if action.stage == stage and action.is_compute]
            total += sum(self._leaving(stage, steps) * often for steps, often in steps_of.counted(actions))
        return total

    # -- the end of the step ------------------------------------------------------------------------------------------------------------

    def _end(self) -> Iterator[Meeting]:
        """Gradients summed, those of tied parameters over their stages too, then the norm, then the optimizer."""
        everywhere = range(len(self.stages))
        for stage in everywhere:
            yield self._meeting(stage, self.work[stage].synchronised())
        yield from self._tied()
        if self.options.clip and self.plan.devices > 1:
            ranks = range(self.plan.devices)
            seconds = time_s("all_reduce", _NORM_BYTES, place(self.cluster, ranks))
            leaving = self.census.collective("all_reduce", _NORM_BYTES, ranks)
            yield Meeting(tuple(everywhere), (Step(seconds, "all ranks", "norm"),), leaving)
        for stage in everywhere:
            device = slowest_device(self.cluster, self.ranks[stage])
            fused = self.options.execution.fused
            yield Meeting((stage,), (optimizer_step(self.traffic[stage], device, self.options.optimizer, fused, self.options.clip),))

    def _meeting(self, stage: int, steps: Steps) -> Meeting:
        return Meeting((stage,), steps, self._leaving(stage, steps))

    def _tied(self) -> Iterator[Meeting]:
        """Copies of one parameter on several stages add up their gradients, rank by rank."""
        by_stages: dict[tuple[int, ...], float] = {}
        for stage in range(len(self.stages)):
            shares = self.traffic[stage].shares
            for entry in shares.trained:
                if entry.stages and entry.stages[0] == stage:
                    bytes_ = float(shares.held_numel(entry)) * shares.summed(entry)
                    by_stages[entry.stages] = by_stages.get(entry.stages, 0.0) + bytes_
        for stages, bytes_ in by_stages.items():
            groups = _groups_across([self.ranks[stage] for stage in stages])
            if len(groups[0]) > 1:
                seconds = time_s("all_reduce", bytes_, place(self.cluster, groups[0]))
                leaving = sum(self.census.collective("all_reduce", bytes_, ranks) for ranks in groups)
                yield Meeting(stages, (Step(seconds, "tied", "tied gradients"),), leaving)


def _groups_across(stages: Sequence[range]) -> list[list[int]]:
    """Ranks of several stages that hold the same part, in proportion where the stages differ in size."""
    count = max(map(len, stages))
    return [sorted({ranks[index * len(ranks) // count] for ranks in stages}) for index in range(count)]


class _Collectives:
    """Seconds of collectives among the ranks of a stage; each question is answered once."""

    def __init__(self, cluster: Cluster, mesh: Mapping[str, int], first_rank: int) -> None:
        self._cluster, self._mesh, self._first = cluster, dict(mesh), first_rank
        self._places: dict[tuple[str, ...], Place] = {}
        self._known: dict[tuple[Kind, tuple[str, ...], float], float] = {}

    def __call__(self, kind: Kind, axes: tuple[str, ...], bytes_: float) -> float:
        key = kind, axes, bytes_
        if key not in self._known:
            if axes not in self._places:
                self._places[axes] = group_place(self._cluster, self._mesh, axes, self._first)
            self._known[key] = time_s(kind, bytes_, self._places[axes])
        return self._known[key]


_Key = tuple[int, ActionKind, bool, bool]
"""Stage, kind, of the first micro-batch, of the last."""


class _ActionSteps:
    """The steps of each action; those of middle micro-batches are alike."""

    def __init__(self, stages: Sequence[StageWork], schedule: Schedule) -> None:
        self._stages = stages
        self._known: dict[_Key, Steps] = {}
        self._first: dict[int, int] = {}
        self._last: dict[int, int] = {}
        for ranks in schedule.groups:
            for action in schedule.lists[ranks[0]]:
                if action.kind == "F":
                    self._first.setdefault(action.stage, action.micro_batch)
                if action.kind in ("B", "W"):
                    self._last[action.stage] = action.micro_batch

    def __call__(self, action: Action) -> Steps:
        return self._of(self._key(action))

    def counted(self, actions: Iterable[Action]) -> list[tuple[Steps, int]]:
        """The steps of some actions, and of how many of them."""
        return [(self._of(key), often) for key, often in Counter(map(self._key, actions)).items()]

    def _key(self, action: Action) -> _Key:
        stage, batch = action.stage, action.micro_batch
        return stage, action.kind, batch == self._first[stage], batch == self._last[stage]

    def _of(self, key: _Key) -> Steps:
        if key not in self._known:
            stage, kind, first, last = key
            self._known[key] = self._stages[stage].steps(kind, first=first, last=last)
        return self._known[key]

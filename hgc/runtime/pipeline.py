"""A pipelined program ready to train: the stages of this rank, the schedule that they follow, and the whole model's state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgc.errors import ArtifactError, PlanError
from hgc.ir.ops import random
from hgc.ir.ops.collectives import sum_over
from hgc.ir.ops.groups import describe
from hgc.runtime import batches, checkpoint, weights
from hgc.runtime.executor import Executor
from hgc.runtime.executor_exchange import side
from hgc.runtime.executor_messages import Link, Shape
from hgc.runtime.executor_transport import open_transport
from hgc.runtime.mesh import Mesh, groups_along, make_groups, part_mesh, pick_device, start
from hgc.runtime.modules import Declaration, Model
from hgc.runtime.pipeline_info import PipelineInfo
from hgc.runtime.pipeline_stage import StageTrainer
from hgc.runtime.pipeline_tied import TiedGradients
from hgc.runtime.plan_info import Input, PlanInfo
from hgc.runtime.state import entries_of
from hgc.runtime.trainer import Trainer, read_constants

Stages = Sequence[Callable[[], Model]]


class PipelineTrainer:
    """Trains ``stages`` as ``plan`` says: the interface of :class:`Trainer`, for a program whose blocks are on different ranks.

    Each rank has the parameters of its own stages. ``micro_batches`` may only confirm the schedule's number. Raises ``PlanError`` for a
    schedule that would not run to its end.
    """

    def __init__(
        self,
        stages: Stages,
        plan: PipelineInfo,
        *,
        state: Mapping[str, Tensor] | None = None,
        device: str = "auto",
        micro_batches: int | None = None,
        **options: Any,
    ) -> None:
        if len(stages) != len(plan.stages):
            raise PlanError(f"the program has {len(stages)} stages, its plan {len(plan.stages)}; correct the program")
        _check_schedule(plan)
        if micro_batches not in (None, plan.micro_batches):
            raise PlanError(
                f"micro_batches is {micro_batches}, but the program's schedule is for {plan.micro_batches}; "
                f"compile it with micro_batches={micro_batches}"
            )
        self.plan, self.micro_batches = plan, plan.micro_batches
        self.mesh = start(plan, pick_device(device))
        self._world = describe(dist.group.WORLD)  # type: ignore[arg-type]
        transport = open_transport()
        self._executor = Executor(plan.actions, links_of(plan), self.mesh.rank, transport, self.mesh.device)
        self._holders, self._declared, groups = _survey(stages, plan, self.mesh.device)
        make_groups(groups)
        values = {**read_constants(stages[0], plan), **(state or {})}
        self._stages: dict[int, StageTrainer] = {}
        for index, stage in enumerate(plan.stages):
            if self.mesh.rank in stage.ranks:
                part = part_mesh(stage.mesh, stage.first_rank, self.mesh.rank, self.mesh.device)
                self._stages[index] = StageTrainer(stages[index], plan, index, part, state=values, **options)
        self._dtypes = next(iter(self._stages.values())).dtypes
        self._tied = TiedGradients(self._holders, plan, self._stages, transport, self.mesh)

    @property
    def parts(self) -> tuple[Trainer, ...]:
        """The trainers of this rank's stages."""
        return tuple(self._stages.values())

    @property
    def executor(self) -> Executor:
        """What plays the schedule."""
        return self._executor

    # -- training ---------------------------------------------------------------------------------------------------------------------

    def step(self, batch: batches.Batch) -> Tensor:
        """Forward, backward and gradient synchronisation; returns the loss, a detached 0-d tensor, the same on every rank."""
        self._tied.begin()
        loss = self._run(batch, trains=True)
        self._tied.add_up()
        return loss

    @torch.no_grad()
    def loss(self, batch: batches.Batch) -> Tensor:
        """The loss of a batch without gradients."""
        return self._run(batch, trains=False)

    def _run(self, batch: batches.Batch, trains: bool) -> Tensor:
        parts, sizes = self._parts(batch)
        seed = random.next_seed(())
        for stage in self._stages.values():
            stage.begin(parts, trains, seed)
        # backward in this thread: recomputed operators look up their groups, and the table belongs to the thread
        with torch.autograd.set_multithreading_enabled(False):
            self._executor.run(self._stages, self._shapes(sizes), trains)
        for stage in self._stages.values():
            stage.finish()
        return self._loss()

    def _parts(self, batch: batches.Batch) -> tuple[list[dict[str, Tensor]], dict[str, int]]:
        """The micro-batches of the global batch, and the sizes of one."""
        if isinstance(batch, batches.LocalBatch):
            raise batches.BatchError("a LocalBatch is one rank's part, but stages take different parts; give the global batch as a dict")
        batches.check_names(batch, self.plan)
        batches.check_sizes(batch, self.plan)
        parts = batches.micro_batches(batch, self.micro_batches, self.plan)
        return parts, batches.check_sizes(parts[0], self.plan)

    def _shapes(self, sizes: Mapping[str, int]) -> dict[str, Shape]:
        return {
            name: Shape(batches.shape_of(Input(value.shape, value.dtype), sizes), self._dtypes.other(value.dtype))
            for name, value in self.plan.values.items()
        }

    def _loss(self) -> Tensor:
        """From the stage that has it to all ranks, in float64."""
        last = len(self.plan.stages) - 1
        mine = self._stages[last].mean_loss().double() if last in self._stages else None
        found = mine if mine is not None else torch.empty((), dtype=torch.float64, device=self.mesh.device)
        if self._world.size > 1:
            dist.broadcast(found, self.plan.stages[last].first_rank)
        return found

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``; returns the norm before scaling."""
        total = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        for index, stage in self._stages.items():
            total += stage.squared_norm({name for name, holders in self._holders.items() if holders[0] == index})
        norm = (sum_over(total, self._world.name) if self._world.size > 1 else total).sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    # -- state ------------------------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's share of each parameter of its stages, a plain tensor, under the user's name; of one that several stages hold the
        first has the name, and a copy in stage ``k`` is ``name@k``."""
        for index, stage in self._stages.items():
            for name, parameter in stage.named_parameters():
                yield (name if self._holders[name][0] == index else f"{name}@{index}"), parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's share of each parameter of its stages, for any elementwise optimizer."""
        for stage in self._stages.values():
            yield from stage.parameters()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers under the user's names, tied names too, on every rank; all ranks must call it."""
        aliases = set(self.plan.tied)
        own = {
            index: {name: tensor for name, tensor in stage.full_state_dict().items() if name not in aliases}
            for index, stage in self._stages.items()
        }
        found = self._from_all(own)
        return found | {alias: found[name] for alias, name in self.plan.tied.items() if name in found}

    def state_dict(self) -> dict[str, Tensor]:
        """The same as :meth:`full_state_dict`."""
        return self.full_state_dict()

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients under the user's names, ``None`` where there is none; all ranks must call it."""
        found = {index: stage.full_gradients() for index, stage in self._stages.items()}
        known = self._from_all({index: {n: g for n, g in theirs.items() if g is not None} for index, theirs in found.items()})
        return {name: known.get(name) for name, declared in self._declared.items() if declared.kind == "parameter"}

    def _from_all(self, own: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """What each stage has of what it holds first, on every rank."""
        found: dict[str, Tensor] = {}
        for index, stage in enumerate(self.plan.stages):
            mine = {name: tensor for name, tensor in own.get(index, {}).items() if self._holders[name][0] == index}
            if self._world.size == 1:
                found |= mine
                continue
            described = [[(name, tuple(tensor.shape), tensor.dtype) for name, tensor in mine.items()]]
            dist.broadcast_object_list(described, stage.first_rank)
            for name, shape, dtype in described[0]:
                tensor = mine[name].contiguous() if name in mine else torch.empty(shape, dtype=dtype, device=self.mesh.device)
                dist.broadcast(tensor, stage.first_rank)
                found[name] = tensor
        return found

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and persistent buffers from whole tensors. Raises ``ArtifactError`` for names or shapes that do not fit."""
        given = {self.plan.tied.get(name, name): tensor for name, tensor in state.items()}
        unknown = next((name for name in given if name not in self._holders), None)
        if unknown is not None:
            raise ArtifactError(
                f"the state has {unknown!r}, which the program does not know; use the state dict of the model that was compiled"
            )
        for index, stage in self._stages.items():
            stage.load_state_dict({name: tensor for name, tensor in given.items() if index in self._holders[name]})

    def save(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None, step: int = 0) -> None:
        """Write a checkpoint that any plan of the same model can load; all ranks must call it."""
        stored = [found for index, stage in self._stages.items() for found in stage.stored() if self._holders[found.entry.name][0] == index]
        owned = {name: parameter for name, parameter in self.named_parameters() if "@" not in name}
        checkpoint.save(Path(path), stored, owned, self.mesh, optimizer, step, names=self._names())

    def load(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Read a checkpoint and return its step; all ranks must call it. Raises ``ArtifactError`` if it is missing or of another model."""
        elsewhere = [name for name, declared in self._declared.items() if declared.persistent]
        state: dict[Tensor, Any] = {}
        step = 0
        for number in range(self._copies()):
            stored, parameters = self._numbered(number)
            step = checkpoint.load(Path(path), stored, parameters, optimizer, self._names(), elsewhere)
            state.update(optimizer.state if optimizer is not None else {})
        if optimizer is not None:
            optimizer.state.update(state)  # each load leaves only its own
        return step

    def _copies(self) -> int:
        """The most copies of one tensor on any rank."""
        on_rank = Counter(
            (name, rank) for name, found in self._holders.items() for index in found for rank in self.plan.stages[index].ranks
        )
        return max(on_rank.values())

    def _numbered(self, number: int) -> tuple[list[checkpoint.Stored], dict[str, nn.Parameter]]:
        """Of each tensor the copy of that number on this rank, if it has so many."""
        stored: list[checkpoint.Stored] = []
        parameters: dict[str, nn.Parameter] = {}
        for index, stage in self._stages.items():
            for found in stage.stored():
                name = found.entry.name
                if [other for other in self._holders[name] if other in self._stages].index(index) == number:
                    stored.append(found)
                    parameters |= {name: stage.parameter(name)} if found.entry.is_parameter else {}
        return stored, parameters

    def export(self, path: str | Path) -> None:
        """Write parameters and persistent buffers to a ``.safetensors`` file, whole, under the names and in the dtypes of the user's model.

        Of tied names one is written, as Hugging Face does. Rank 0 writes, all ranks must call it. Raises ``ArtifactError``.
        """
        weights.check_export(Path(path))
        found = self.full_state_dict()
        if self.mesh.rank == 0:
            kept = {name: tensor for name, tensor in found.items() if name not in self.plan.tied}
            weights.write_weights(Path(path), {name: tensor.to("cpu", self._declared[name].dtype) for name, tensor in kept.items()})
        dist.barrier()

    def _names(self) -> dict[nn.Parameter, str]:
        """The user's name of every parameter of this rank, copies too."""
        return {parameter: name for stage in self._stages.values() for name, parameter in stage.named_parameters()}


def _check_schedule(plan: PipelineInfo) -> None:
    """Raise ``PlanError`` unless the schedule is for the plan's stages, ranks and micro-batches."""
    hosts = plan.actions.stages
    if len(hosts) != len(plan.stages) or plan.actions.micro_batches != plan.micro_batches:
        raise PlanError(
            f"the schedule is for {len(hosts)} stages and {plan.actions.micro_batches} micro-batches, the plan for {len(plan.stages)} and "
            f"{plan.micro_batches}; correct the program"
        )
    wrong = next((index for index, stage in enumerate(plan.stages) if hosts[index] != tuple(stage.ranks)), None)
    if wrong is not None:
        own = list(plan.stages[wrong].ranks)
        raise PlanError(f"the schedule has stage {wrong} on ranks {list(hosts[wrong])}, the plan on {own}; correct the program")


def links_of(plan: PipelineInfo) -> list[Link]:
    """Every edge with where its value lives on both sides."""
    links = []
    for edge in plan.edges:
        maker, reader = plan.stages[edge.maker], plan.stages[edge.reader]
        placements = next(found for name, found in reader.receives.values() if name == edge.value)
        source = side(maker.first_rank, maker.mesh, maker.results[edge.value])
        target = side(reader.first_rank, reader.mesh, placements)
        links.append(Link(edge.value, edge.maker, edge.reader, source, target, plan.values[edge.value].gradient))
    return links


def _survey(
    stages: Stages, plan: PipelineInfo, device: torch.device
) -> tuple[dict[str, tuple[int, ...]], dict[str, Declaration], list[tuple[int, ...]]]:
    """Of all stages, without their memory: name of state -> the stages that hold it, and how the first declares it; the ranks of all groups
    that stages communicate in."""
    holders: dict[str, tuple[int, ...]] = {}
    declarations: dict[str, Declaration] = {}
    groups: dict[tuple[int, ...], None] = {}
    for index, made in enumerate(stages):
        model, stage, stage_plan = made(), plan.stages[index], plan.stage_plan(index)
        model.tie(plan.tied)
        place = Mesh(dict(stage.mesh), stage.first_rank, dict.fromkeys(stage.mesh, 0), device, stage.first_rank)
        entries = entries_of(model, stage_plan, place)
        for entry in entries:
            holders[entry.name] = (*holders.get(entry.name, ()), index)
            declarations.setdefault(entry.name, entry.declared)
        for axes in dict.fromkeys([*((axis,) for axis in stage.mesh), stage_plan.summed_axes, *(entry.sync for entry in entries)]):
            groups.update(dict.fromkeys(groups_along(stage.mesh, stage.first_rank, axes) if axes else ()))
    return holders, declarations, list(groups)


def make_trainer(model: Callable[[], Model] | Stages, plan: PlanInfo, **options: Any) -> Trainer | PipelineTrainer:
    """The trainer of a program: of its model, or of the stages of a pipeline. ``options`` are the trainer's."""
    if isinstance(plan, PipelineInfo):
        assert isinstance(model, Sequence)
        return PipelineTrainer(model, plan, **options)
    assert callable(model)
    return Trainer(model, plan, **options)

"""A trace of one real training step, in the format of the simulator's; see docs/design/runtime.md."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hgc import traces
from hgc._torch_compat import intercepted_collectives, named_gathers
from hgc.errors import PlanError
from hgc.runtime.fsdp import sharded_modules
from hgc.runtime.modules import Block
from hgc.runtime.pipeline import PipelineTrainer
from hgc.runtime.pipeline_info import PipelineInfo
from hgc.runtime.plan_info import PlanInfo
from hgc.runtime.tracing_clock import clock_of
from hgc.runtime.tracing_recorder import Recorder, Span
from hgc.runtime.trainer import Trainer
from hgc.schedule import Action
from hgc.traces import OPTIMIZER


@contextmanager
def traced(trainer: Trainer | PipelineTrainer, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    """Write what happens inside, a training step, to ``path``; all ranks must enter together, rank 0 writes.

    Raises ``PlanError`` for compiled blocks, whose collectives nobody can see from outside, ``ArtifactError`` for a file that cannot be
    written. A process must be one rank.
    """
    with recorded(trainer, optimizer) as spans:
        yield
    save(spans, path)


@contextmanager
def recorded(trainer: Trainer | PipelineTrainer, optimizer: torch.optim.Optimizer | None = None) -> Iterator[list[Span]]:
    """The same without a file: the list holds this rank's spans afterwards."""
    parts = trainer.parts
    compiled = any("forward" in vars(module) for part in parts for module in part.model.modules() if isinstance(module, Block))
    if compiled:
        raise PlanError("compile_blocks hides the collectives inside blocks from a trace; trace the program without --compile")
    recorder = Recorder(clock_of(trainer.mesh.device), _rows(parts), partial(_message_row, trainer.plan))
    found: list[Span] = []
    with ExitStack() as stack:
        stack.enter_context(intercepted_collectives(recorder.functional, recorder.distributed))
        for part in parts:
            _watch(part.model, recorder, stack)
        if optimizer is not None:
            name = type(optimizer).__name__.lower()
            before = optimizer.register_step_pre_hook(lambda *_: recorder.begins(name, OPTIMIZER))
            after = optimizer.register_step_post_hook(lambda *_: recorder.ends())
            stack.callback(before.remove)
            stack.callback(after.remove)
        player: Any = trainer.executor if isinstance(trainer, PipelineTrainer) else trainer
        player.around = recorder.action
        stack.callback(delattr, player, "around")
        yield found
    found += recorder.spans()


def save(spans: list[Span], path: str | Path) -> None:
    """Write the spans of all ranks; all ranks must call it. Raises ``ArtifactError``."""
    rank, world = dist.get_rank(), dist.get_world_size()
    everyone: list[Any] | None = [None] * world if rank == 0 else None
    dist.gather_object(spans, everyone)
    if everyone is not None:
        traces.save([traces.Process(f"rank {index}", theirs) for index, theirs in enumerate(everyone)], path)


def _watch(model: nn.Module, recorder: Recorder, stack: ExitStack) -> None:
    """Hooks on blocks, between those of FSDP2 and the computation, and names for what FSDP2 moves."""
    for module in model.modules():
        if isinstance(module, Block):
            name = _name(module)
            before = module.register_forward_pre_hook(partial(_before, recorder, name))
            after = module.register_forward_hook(partial(_after, recorder, name), prepend=True, always_call=True)
            stack.callback(before.remove)
            stack.callback(after.remove)
    for unit in sharded_modules(model):
        what = _name(unit)
        stack.enter_context(named_gathers(unit, partial(recorder.moving, f"gather {what}"), partial(recorder.moving, f"scatter {what}")))


def _before(recorder: Recorder, name: str, *_: Any) -> None:
    recorder.begins(name)


def _after(recorder: Recorder, name: str, module: nn.Module, args: Any, results: Any) -> None:
    recorder.ends()
    for result in results if isinstance(results, tuple) else (results,):
        if isinstance(result, Tensor) and result.requires_grad:
            result.register_hook(lambda _: recorder.backward_of(name))  # type: ignore[no-untyped-call]


def _name(module: nn.Module | FSDPModule) -> str:
    """As simulations name blocks and units: their place in the user's model, else their class, and the root unit."""
    if not isinstance(module, Block):
        return "root"
    cls = type(module)
    return module._hgc_path or (cls.__mro__[2].__name__ if isinstance(module, FSDPModule) else cls.__name__)


def _rows(parts: tuple[Trainer, ...]) -> dict[str, str]:
    """Name of a process group -> the axes that it lies along; of several names the one with fewest axes."""
    world = dist.group.WORLD
    assert world is not None
    rows: dict[str, str] = {}
    for part in parts:
        for axes, group in sorted(part.mesh.known_groups().items(), key=lambda found: len(found[0])):
            named = [axis for axis in axes if part.mesh.sizes[axis] > 1]
            if named:
                rows.setdefault(group.name, "+".join(named))
    return {str(world.group_name): "all ranks"} | rows


def _message_row(plan: PlanInfo, action: Action, peer: int) -> str:
    """``"pp 0 to 1"``, from stage to stage."""
    assert isinstance(plan, PipelineInfo)
    forward = action.kind in ("SEND_F", "F")
    others = [edge.reader if forward else edge.maker for edge in plan.edges if action.stage == (edge.maker if forward else edge.reader)]
    there = [stage for stage in others if peer in plan.stages[stage].ranks]
    return f"pp {action.stage} to {there[0]}" if there else f"pp to rank {peer}"

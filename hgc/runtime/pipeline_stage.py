"""One stage of a pipeline on this rank: forward and backward for one micro-batch after the other, in whatever order is asked for."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from hgc._torch_compat import backward_of_inputs, backward_of_parameters, backward_splits, settled
from hgc.ir.ops import random
from hgc.runtime.batches import local_batch
from hgc.runtime.checkpoint import Stored
from hgc.runtime.fsdp import before_micro_batch, release_gathered
from hgc.runtime.mesh import Mesh
from hgc.runtime.modules import Model
from hgc.runtime.pipeline_info import PipelineInfo
from hgc.runtime.shards import Layout
from hgc.runtime.trainer import Trainer


@dataclass
class _Alive:
    """What a micro-batch leaves between its forward and its backward."""

    received: dict[str, Tensor]
    results: dict[str, Tensor]
    rest: Any = None


@dataclass
class _Work:
    """What is left to do in a step, and what is alive."""

    parts: list[dict[str, Tensor]]
    trains: bool
    seed: int
    backwards: int
    alive: dict[int, _Alive] = field(default_factory=dict)
    losses: dict[int, Tensor] = field(default_factory=dict)


LOSS = ""
"""The name of the loss among the results of the last stage."""


class StageTrainer(Trainer):
    """State and computation of stage ``index``; the pipeline says what to do when.

    Gradients are summed over the stage's ranks once, while or after the last micro-batch's backward. ``options`` are the trainer's.
    """

    def __init__(self, model: Callable[[], Model], plan: PipelineInfo, index: int, mesh: Mesh, **options: Any) -> None:
        super().__init__(model, plan.stage_plan(index), mesh=mesh, **options)
        self.index, self.stage = index, plan.stages[index]
        self._values = plan.values
        self._work = _Work([], False, 0, 0)
        self._splits: bool | None = None

    # -- a step -----------------------------------------------------------------------------------------------------------------------

    def begin(self, parts: Sequence[Mapping[str, Tensor]], trains: bool, seed: int) -> None:
        """Before the first micro-batch; ``parts`` are the global tensors of each, ``seed`` is alike on all ranks."""
        own = [{name: part[name] for name in self.plan.inputs} for part in parts]
        self._work = _Work([local_batch(part, self.plan, self.mesh) for part in own], trains, seed, len(parts))
        for share in self._shares.values():
            share.refresh()
            if trains:
                share.before_backward()
        if trains:
            self._reducer.begin_step()

    def finish(self) -> None:
        """After the last: gradients are summed and where the optimizer looks for them."""
        if self._work.trains:
            self._reducer.finish()
            for share in self._shares.values():
                share.after_backward()
        else:
            release_gathered(self.model)

    def mean_loss(self) -> Tensor:
        """Of the last stage's micro-batches, alike on all its ranks."""
        return torch.stack([settled(self._work.losses[index]) for index in sorted(self._work.losses)]).mean()

    # -- the executor's view ----------------------------------------------------------------------------------------------------------

    def forward(self, micro_batch: int, received: dict[str, Tensor]) -> dict[str, Tensor]:
        for name, tensor in received.items():
            tensor.requires_grad_(self._work.trains and self._values[name].gradient)
        given = dict(self._work.parts[micro_batch])
        given = {name: self.dtypes.input(tensor) for name, tensor in given.items()}
        given |= {parameter: received[name] for parameter, (name, _) in self.stage.receives.items()}
        # stages draw different numbers, and the ranks of one stage the same, whatever the order of work
        numbers = random.stream(random.derived_seed(self._work.seed, self.index, micro_batch))
        with self.mesh.active(), self.dtypes.computing(self.mesh.device), numbers:
            returned = self.model(**given)
        results = self._by_name(returned)
        if LOSS in results:
            self._work.losses[micro_batch] = results[LOSS].detach()
        if self._work.trains:
            self._work.alive[micro_batch] = _Alive(received, results)
        return results

    def _by_name(self, returned: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
        values = (returned,) if isinstance(returned, Tensor) else returned
        if not self.stage.results:
            return {LOSS: values[0]}
        named = zip(self.stage.results, values, strict=True)
        return {name: settled(tensor).to(self.dtypes.other(self._values[name].dtype)) for name, tensor in named}

    def backward(self, micro_batch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        alive = self._work.alive.pop(micro_batch)
        self._before_gradients()
        self._whole_backward(alive, gradients)
        return self._handed_back(alive)

    def backward_inputs(self, micro_batch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """A stage that hands nothing back leaves everything to ``backward_weights``; one with a result that depends on parameters alone,
        or with sharded parameters, does everything now."""
        alive = self._work.alive[micro_batch]
        inputs = [tensor for tensor in alive.received.values() if tensor.requires_grad]
        if not inputs:
            alive.rest = gradients
            return {}
        results, given = self._differentiable(alive, gradients)
        if self._splits is None:
            # parameters that FSDP2 gathers are other tensors in each forward, which their gradients would not find afterwards
            self._splits = not isinstance(self.model, FSDPModule) and backward_splits(results, inputs)
        if not self._splits:
            back = self.backward(micro_batch, gradients)
            self._work.alive[micro_batch] = _Alive({}, {})
            return back
        with self.mesh.active():
            found, rest = backward_of_inputs(results, given, inputs, self._trained())
        for tensor, gradient in zip(inputs, found, strict=True):
            tensor.grad = gradient
        back = self._handed_back(alive)
        self._work.alive[micro_batch] = _Alive({}, {}, rest)
        return back

    def backward_weights(self, micro_batch: int) -> None:
        alive = self._work.alive.pop(micro_batch)
        if self._splits is False:
            return  # done with the inputs
        self._before_gradients()
        if alive.results:
            self._whole_backward(alive, alive.rest)
        else:
            with self.mesh.active():
                backward_of_parameters(self._trained(), alive.rest)

    def _before_gradients(self) -> None:
        """The last backward of the step is the one whose end shall find summed gradients."""
        self._work.backwards -= 1
        last = self._work.backwards == 0
        before_micro_batch(self.model, self.plan.zero, last)
        if isinstance(self.model, FSDPModule):
            self.model.set_is_last_backward(last)
        if last:
            self._reducer.begin()

    def _whole_backward(self, alive: _Alive, gradients: dict[str, Tensor]) -> None:
        results, given = self._differentiable(alive, gradients)
        if results:
            with self.mesh.active():
                torch.autograd.backward(results, given)

    def _differentiable(self, alive: _Alive, gradients: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Results that have a history, each with its gradient; a micro-batch's loss counts for its share of the batch."""
        if LOSS in alive.results:
            loss = alive.results[LOSS]
            return [loss], [torch.full_like(loss, 1 / len(self._work.parts))]
        named = [(tensor, gradients[name]) for name, tensor in alive.results.items() if tensor.requires_grad and name in gradients]
        return [tensor for tensor, _ in named], [gradient for _, gradient in named]

    def _handed_back(self, alive: _Alive) -> dict[str, Tensor]:
        """Gradients of what was received; zero for what turned out not to matter."""
        needed = {name: tensor for name, tensor in alive.received.items() if tensor.requires_grad}
        return {name: torch.zeros_like(tensor) if tensor.grad is None else settled(tensor.grad) for name, tensor in needed.items()}

    def _trained(self) -> list[nn.Parameter]:
        return [share.held for share in self._shares.values() if share.held.requires_grad]

    # -- the pipeline's view ----------------------------------------------------------------------------------------------------------

    def parameter(self, name: str) -> nn.Parameter:
        """This rank's share of a parameter."""
        return self._shares[name].parameter

    def layout(self, name: str) -> Layout | None:
        """How a trained parameter lies on the stage's mesh; ``None`` for anything else."""
        return next((e.layout for e in self._entries if e.name == name and e.is_parameter and e.declared.requires_grad), None)

    def squared_norm(self, names: Container[str]) -> Tensor:
        """This rank's summand of the square of the norm of the named parameters' gradients."""
        return self._squared_norm(names)

    def stored(self) -> list[Stored]:
        """What checkpoints hold of the stage."""
        return self._stored()

"""A program ready to train: parameters in place, gradients synchronised, state in and out under the user's names."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hgc._torch_compat import settled
from hgc.errors import ArtifactError, PlanError
from hgc.ir.ops.collectives import sum_over
from hgc.ir.ops.groups import describe
from hgc.plan import Precision
from hgc.runtime import batches, checkpoint, compiled, weights
from hgc.runtime.fsdp import before_micro_batch, find_units, release_gathered, shard_model
from hgc.runtime.mesh import Mesh, pick_device, start
from hgc.runtime.modules import Model
from hgc.runtime.plan_info import PlanInfo
from hgc.runtime.precision import read_precision
from hgc.runtime.reducer import BUCKET_BYTES, Reducer
from hgc.runtime.shares import Share
from hgc.runtime.state import Entry, allocate, entries_of, fill, gather_whole, load_whole, plain, replicas


class Trainer:
    """Trains ``model`` as ``plan`` says; see docs/design/runtime.md.

    ``state`` holds whole tensors under the user's names (parameters, buffers, constants), the same on every rank; what it lacks is
    initialised from ``seed``. ``precision`` and ``micro_batches`` take the place of the plan's; ``dtype`` is a short form of
    ``Precision(parameters=...)``, which replaces all floating dtypes, those of inputs too. ``compile_blocks``: run the body of every
    block through torch.compile, compiled once for each class. ``mesh``: part of the job that runs the program, if not all of it does.
    """

    around: Callable[[str], AbstractContextManager[Any]] = nullcontext
    """What each forward and backward runs in, given its name in the notation of schedules (``"0F1"``); a trace looks in here."""

    def __init__(
        self,
        model: Callable[[], Model],
        plan: PlanInfo,
        *,
        state: Mapping[str, Tensor] | None = None,
        seed: int = 0,
        device: str = "auto",
        dtype: torch.dtype | None = None,
        precision: Precision | None = None,
        micro_batches: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        compile_blocks: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        if dtype is not None and precision is not None:
            raise PlanError(f"dtype {dtype} and precision ({precision}) both say what parameters are kept in; give one of them")
        self.plan = plan
        self.mesh = mesh or start(plan, pick_device(device))
        self.model = model()
        self.model.tie(plan.tied)
        self.micro_batches = micro_batches or plan.micro_batches
        chosen = Precision(parameters=str(dtype).removeprefix("torch.")) if dtype is not None else precision or plan.precision
        self.dtypes = dtypes = read_precision(chosen)
        values = self._by_declared_name({**read_constants(model, plan), **(state or {})})
        self._entries = entries_of(self.model, plan, self.mesh)

        def prepare(entries: Iterable[Entry]) -> None:
            new = list(entries)
            allocate(new, self.mesh, dtypes)
            fill(new, values, seed)

        if plan.zero and plan.summed_axes:
            units = find_units(self.model, self._entries)
            self._entries = shard_model(self.model, units, plan.summed_axes, self.mesh, prepare, dtypes, plan.zero)
        else:
            prepare(self._entries)
        trained = [entry for entry in self._entries if entry.is_parameter]
        self._shares = {entry.name: Share(entry, dtypes) for entry in trained}
        self._buffers = {entry.name: entry.module_tensor() for entry in self._entries if not entry.is_parameter}
        summed = [(self._shares[entry.name].held, self.mesh.group(entry.sync)) for entry in trained if entry.sync]
        self._reducer = Reducer(summed, bucket_bytes, dtypes.gradients)
        self._world = describe(torch.distributed.group.WORLD)  # type: ignore[arg-type]
        if compile_blocks:
            compiled.compile_blocks(self.model)

    @property
    def parts(self) -> tuple[Trainer, ...]:
        """The trainers of this rank's models: this one."""
        return (self,)

    # -- training ---------------------------------------------------------------------------------------------------------------------

    def step(self, batch: batches.Batch) -> Tensor:
        """Forward, backward and gradient synchronisation; returns the loss, a detached 0-d tensor, the same on every rank."""
        parts = batches.micro_batches(batches.local_batch(batch, self.plan, self.mesh), self.micro_batches, self.plan)
        for share in self._shares.values():
            share.refresh()
            share.before_backward()
        self._reducer.begin_step()
        losses = []
        # backward in this thread: recomputed operators look up their groups, and the table belongs to the thread
        with self.mesh.active(), torch.autograd.set_multithreading_enabled(False):
            for index, part in enumerate(parts):
                last = index == len(parts) - 1
                before_micro_batch(self.model, self.plan.zero, last)
                if last:
                    self._reducer.begin()
                with self.around(f"0F{index}"):
                    loss = self._forward(part)
                weight = torch.full((), 1 / len(parts), dtype=loss.dtype, device=loss.device)
                with self.around(f"0B{index}"):
                    loss.backward(weight)  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
            self._reducer.finish()
        for share in self._shares.values():
            share.after_backward()
        return settled(losses[0]) if len(losses) == 1 else torch.stack(losses).mean()

    @torch.no_grad()
    def loss(self, batch: batches.Batch) -> Tensor:
        """The loss of a batch without gradients."""
        for share in self._shares.values():
            share.refresh()
        with self.mesh.active():
            parts = batches.micro_batches(batches.local_batch(batch, self.plan, self.mesh), self.micro_batches, self.plan)
            loss = torch.stack([self._forward(part) for part in parts]).mean()
        release_gathered(self.model)
        return loss

    def _forward(self, part: Mapping[str, Tensor]) -> Tensor:
        with self.dtypes.computing(self.mesh.device):
            loss = self.model(**{name: self.dtypes.input(tensor) for name, tensor in part.items()})
        assert isinstance(loss, Tensor)
        return loss

    @torch.no_grad()
    def clip_grad_norm(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over the whole model is at most ``max_norm``; returns the norm before scaling."""
        total = self._squared_norm(self._shares)
        norm = (sum_over(total, self._world.name) if self._world.size > 1 else total).sqrt()
        nn.utils.clip_grads_with_norm_(self.parameters(), max_norm, norm)
        return norm

    def _squared_norm(self, names: Container[str]) -> Tensor:
        """This rank's summand of the square of the norm of the named parameters' gradients."""
        by_replicas: dict[int, list[Tensor]] = {}
        for entry in self._entries:
            gradient = self._shares[entry.name].parameter.grad if entry.is_parameter and entry.name in names else None
            if gradient is not None:
                by_replicas.setdefault(replicas(entry, self.mesh), []).append(gradient)
        total = torch.zeros((), device=self.mesh.device, dtype=torch.float64)
        for count, gradients in by_replicas.items():
            wide, narrow = [g for g in gradients if g.dtype.itemsize >= 4], [g for g in gradients if g.dtype.itemsize < 4]
            squares = [nn.utils.get_total_norm(wide).double() ** 2] if wide else []
            squares += [torch.linalg.vector_norm(gradient, dtype=torch.float32).double() ** 2 for gradient in narrow]
            total += torch.stack(squares).sum() / count
        return total

    # -- state ------------------------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's share of each parameter, a plain tensor, under the user's name."""
        for name, share in self._shares.items():
            yield name, share.parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        """This rank's share of each parameter, for any elementwise optimizer."""
        for share in self._shares.values():
            yield share.parameter

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters and persistent buffers under the user's names, tied names too, on every rank; all ranks must call it."""
        stored = [entry for entry in self._entries if entry.declared.persistent]
        found = {entry.name: gather_whole(self._local(entry), entry.layout, self.mesh) for entry in stored}
        return found | {alias: found[name] for alias, name in self.plan.tied.items() if name in found}

    def state_dict(self) -> dict[str, Tensor]:
        """The same as :meth:`full_state_dict`."""
        return self.full_state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Set parameters and persistent buffers from whole tensors. Raises ``ArtifactError`` for names or shapes that do not fit."""
        given = self._by_declared_name(state)
        entries = {entry.name: entry for entry in self._entries if entry.declared.persistent}
        missing, unknown = [name for name in entries if name not in given], [name for name in given if name not in entries]
        unknown = [name for name in unknown if all(entry.name != name for entry in self._entries)]
        if missing or unknown:
            what = f"lacks {missing[0]!r}" if missing else f"has {unknown[0]!r}, which the program does not know"
            raise ArtifactError(f"the state {what}; use the state dict of the model that was compiled")
        for name, entry in entries.items():
            load_whole(entry, self._local(entry), given[name])

    def full_gradients(self) -> dict[str, Tensor | None]:
        """Whole gradients under the user's names, ``None`` where there is none; all ranks must call it."""
        return {
            entry.name: None if gradient is None else gather_whole(plain(gradient), entry.layout, self.mesh)
            for entry in self._entries
            if entry.is_parameter
            for gradient in (self._shares[entry.name].parameter.grad,)
        }

    def save(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None, step: int = 0) -> None:
        """Write a checkpoint that any plan of the same model can load; all ranks must call it."""
        checkpoint.save(Path(path), self._stored(), dict(self.named_parameters()), self.mesh, optimizer, step)

    def load(self, path: str | Path, optimizer: torch.optim.Optimizer | None = None) -> int:
        """Read a checkpoint and return its step; all ranks must call it. Raises ``ArtifactError`` if it is missing or of another model."""
        return checkpoint.load(Path(path), self._stored(), dict(self.named_parameters()), optimizer)

    @torch.no_grad()
    def export(self, path: str | Path) -> None:
        """Write parameters and persistent buffers to a ``.safetensors`` file, whole, under the names and in the dtypes of the user's model.

        Of tied names one is written, as Hugging Face does. Rank 0 writes, all ranks must call it. Raises ``ArtifactError``.
        """
        weights.check_export(Path(path))
        found = {}
        for entry in self._entries:
            if entry.declared.persistent:
                whole = gather_whole(self._local(entry), entry.layout, self.mesh)
                if self.mesh.rank == 0:
                    found[entry.name] = whole.to("cpu", entry.declared.dtype)
        if self.mesh.rank == 0:
            weights.write_weights(Path(path), found)
        torch.distributed.barrier()

    def _stored(self) -> list[checkpoint.Stored]:
        return [checkpoint.Stored(entry, self._local(entry)) for entry in self._entries if entry.declared.persistent]

    def _local(self, entry: Entry) -> Tensor:
        """This rank's share of an entry as a plain tensor without history."""
        return self._shares[entry.name].parameter.detach() if entry.is_parameter else self._buffers[entry.name]

    def _by_declared_name(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {self.plan.tied.get(name, name): tensor for name, tensor in values.items()}


def read_constants(model: Callable[[], Model], plan: PlanInfo) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint holds, from the file next to the program."""
    if plan.constants is None:
        return {}
    import inspect

    path = Path(inspect.getfile(getattr(model, "func", model))).with_name(plan.constants)
    if not path.is_file():
        raise ArtifactError(f"the program's constants file {path} is missing; copy it along with the program or compile again")
    loaded = torch.load(path, map_location="cpu", weights_only=True)
    assert isinstance(loaded, dict)
    return loaded

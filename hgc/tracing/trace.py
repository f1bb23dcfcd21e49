"""``hgc.trace``: an ordinary model and example inputs in, a single-device :class:`Program` out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from hgc.errors import TraceError
from hgc.ir.program import Program
from hgc.tracing import adapters
from hgc.tracing.assumptions import violated
from hgc.tracing.calling import Caller, Loss, make_caller
from hgc.tracing.capture import capture
from hgc.tracing.copying import copy_structure
from hgc.tracing.dims import Dims, DynamicSpec, choose_dims, exact, meaning, without
from hgc.tracing.folding import Marking
from hgc.tracing.gradients import mark_gradients
from hgc.tracing.normalise import normalise
from hgc.tracing.prune import prune
from hgc.tracing.shortcuts import Shortcuts, StartOver
from hgc.tracing.split import split


def trace(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    loss: Loss | None = None,
    dynamic: DynamicSpec | None = None,
    fold: bool = True,
    name: str | None = None,
) -> Program:
    """Capture ``model`` and its loss as a :class:`Program`; nothing is executed and the model is not changed.

    Args:
        model: real, or with parameters on the meta device (:func:`hgc.tracing.empty_weights`); in training or evaluation mode as
            it stands.
        example_inputs: the arguments of ``model.forward`` by name. Only the shapes and types of tensors matter; other values are
            constants of the program.
        loss: ``loss(output, batch) -> scalar tensor`` for models that return no loss themselves; inputs that only the loss needs
            belong into ``example_inputs`` too.
        dynamic: ``{input: {dim: name}}``, dims of equal name are equal. By default dim 0 of every tensor is the batch ``b``, and
            dim 1 of two-dimensional integer tensors the sequence ``s`` (``t``, ``u``, ... for other sizes). ``{}`` traces the
            example's sizes only.
        fold: trace equal blocks twice and repeat the result; turn off to compare.
        name: the program's name, by default the model's class.

    Dims that the model pins and shortcuts that were not possible are told in ``Program.report``.

    Raises:
        TraceError: the model cannot be captured; the sentence names the operation, the line and a remedy.
    """
    _check_arguments(model, example_inputs)
    caller, tensors = make_caller(model, example_inputs, loss)
    dims = choose_dims(tensors, dynamic)
    job = _Job(model, tensors, caller, name or type(model).__name__)
    try:
        outcome = job.run(dims, Shortcuts(fold))
    except TraceError:
        dims = exact(dims)
        outcome = job.run(dims, Shortcuts(fold))
    if violated(outcome.program.assumptions, {symbol: max(found.hint, 2) for symbol, found in outcome.program.symbols.items()}):
        dims = exact(dims)
        outcome = job.run(dims, Shortcuts(fold))
    wrong = [label for label, size in outcome.pinned.items() if size != dims.hints[label]]
    if wrong:
        outcome = job.run(without(dims, wrong), Shortcuts(fold))
    for label in dict.fromkeys([*outcome.pinned, *wrong]):
        what = f"{meaning(label, dims.names)} size ({label})"
        outcome.program.report.append(
            f"The {what} is fixed to {dims.hints[label]}: the model computes with its value, not only with its shape."
        )
    return outcome.program


@dataclass(frozen=True)
class _Outcome:
    program: Program
    pinned: dict[str, int]


@dataclass(frozen=True)
class _Job:
    """What is traced, whatever sizes and shortcuts are tried."""

    model: nn.Module
    tensors: Mapping[str, Tensor]
    caller: Caller
    name: str

    def run(self, dims: Dims, shortcuts: Shortcuts) -> _Outcome:
        """Trace, and start over without a shortcut whenever one turns out to be unsound."""
        notes = []
        while True:
            try:
                outcome = self._attempt(dims, shortcuts)
            except StartOver as again:
                shortcuts = again.shortcuts
                notes += [again.reason] if again.reason else []
            else:
                outcome.program.report += notes
                return outcome

    def _attempt(self, dims: Dims, shortcuts: Shortcuts) -> _Outcome:
        copied = copy_structure(self.model)
        with adapters.prepared(copied.model, set(self.tensors), self.caller, shortcuts):
            marking = Marking(copied.model, shortcuts)
            flat = capture(copied, self.tensors, self.caller, dims)
        flat.report += normalise(flat.graph, flat.holders, flat.state, flat.symbols)
        program = split(flat, marking, self.name)
        prune(program)
        mark_gradients(program)
        return _Outcome(program, flat.pinned)


def _check_arguments(model: nn.Module, example_inputs: Mapping[str, Any]) -> None:
    if not isinstance(model, nn.Module):
        raise TraceError(f"The model is a {type(model).__name__}, expected a torch.nn.Module; pass the module itself.")
    if not isinstance(example_inputs, Mapping):
        raise TraceError(f"example_inputs is a {type(example_inputs).__name__}, expected a dict of tensors by argument name.")

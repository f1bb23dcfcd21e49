"""What libraries need so that their models trace well, through their public extension points and on the copy only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from hgc.tracing.adapters import huggingface, lengths
from hgc.tracing.adapters.modules import adapt_modules, adapter
from hgc.tracing.calling import Caller
from hgc.tracing.shortcuts import Shortcuts

__all__ = ["adapter", "prepared"]


@contextmanager
def prepared(model: nn.Module, inputs: set[str], caller: Caller, shortcuts: Shortcuts) -> Iterator[None]:
    """Prepare the copy for export, and undo afterwards whatever reaches beyond it. ``inputs`` are the names of the user's tensors.

    Raises ``StartOver`` if the model does not work the way an adapter expects.
    """
    with ExitStack() as stack:
        if huggingface.applies(model):
            stack.enter_context(huggingface.prepared(model, inputs, caller.constants, shortcuts))
        adapt_modules(model)
        stack.enter_context(lengths.symbolic(model, [caller.loss]))
        yield

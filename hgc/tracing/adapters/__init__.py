"""What libraries need so that their models trace well, through their public extension points and on the copy only."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from hgc.tracing.adapters import huggingface


@contextmanager
def prepared(model: nn.Module, inputs: set[str]) -> Iterator[list[str]]:
    """Prepare the copy for export; yields sentences for the program's report."""
    notes: list[str] = []
    with ExitStack() as stack:
        if huggingface.applies(model):
            stack.enter_context(huggingface.prepared(model, inputs, notes))
        yield notes

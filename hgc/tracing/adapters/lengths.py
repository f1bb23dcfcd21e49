"""``len(tensor)`` must be a Python integer, which would pin a symbolic size; while tracing it is the tensor's first size instead."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def symbolic(model: nn.Module, others: Iterable[Any] = ()) -> Iterator[None]:
    """Give the Python modules that define the model's classes, and the functions ``others``, their own ``len`` for the time being."""
    names = {type(module).__module__ for module in model.modules()} | {str(getattr(other, "__module__", "")) for other in others}
    spaces = [vars(sys.modules[name]) for name in sorted(names) if name in sys.modules and not name.startswith("torch.")]
    changed = [space for space in spaces if "len" not in space]
    for space in changed:
        space["len"] = _len
    try:
        yield
    finally:
        for space in changed:
            del space["len"]


def _len(x: Any) -> Any:
    return x.shape[0] if isinstance(x, Tensor) and x.dim() else builtins.len(x)

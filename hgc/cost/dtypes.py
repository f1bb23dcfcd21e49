"""Dtypes of a training step as costs see them: hgc's own runtime, or a framework that computes without autocast."""

from __future__ import annotations

import torch

from hgc.cost.execution import Execution
from hgc.plan import Precision
from hgc.runtime.precision import Dtypes

_NARROW = ("bfloat16", "float16")


def dtypes_of(precision: Precision, execution: Execution) -> Dtypes:
    """What ``precision`` means under ``execution``; also where programs cannot run in it (float16, narrow products).

    With autocast as :func:`hgc.runtime.precision.read_precision`. Without, the model is in the dtype that it computes in, all of it, and
    what the optimizer updates (``master``, or else ``parameters``) is another copy.
    """
    computed = precision.compute or precision.parameters
    if execution.autocast:
        narrow = computed in _NARROW
        kept = precision.parameters or ("" if narrow else computed)
        others = "float32" if kept in _NARROW else kept
        return Dtypes(
            _dtype(kept), _dtype(precision.master), _dtype(others), _dtype(computed if narrow else ""), _dtype(precision.gradients)
        )
    stored = precision.master or precision.parameters
    master = _dtype(stored) if stored != computed else None
    return Dtypes(_dtype(computed), master, _dtype(computed), None, _dtype(precision.gradients))


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None

"""Dtypes of a training step as costs see them: hgc's own runtime, or a framework that computes without autocast."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hgc.cost.execution import Execution
from hgc.plan import Precision

_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class StepDtypes:
    """``None`` keeps what the program declares.

    ``parameters``: what the model computes with; with ``wide_vectors`` vectors (norms, biases) are in ``others`` instead. ``master``: what
    the optimizer updates, where it differs. ``others``: buffers and floating inputs. ``autocast``: what products are computed in under
    autocast. ``gradients``: in which gradients are summed.
    """

    parameters: torch.dtype | None = None
    master: torch.dtype | None = None
    others: torch.dtype | None = None
    autocast: torch.dtype | None = None
    gradients: torch.dtype | None = None
    wide_vectors: bool = False

    def kept(self, declared: torch.dtype, dims: int) -> torch.dtype:
        """What the model computes with of a parameter that is declared with this dtype and so many dims."""
        return _if_floating(declared, self.others if self.wide_vectors and dims < 2 else self.parameters)

    def stored(self, declared: torch.dtype, dims: int) -> torch.dtype:
        """What the optimizer updates of it."""
        return _if_floating(declared, self.master) if self.master is not None else self.kept(declared, dims)

    def summed(self, declared: torch.dtype, dims: int) -> torch.dtype:
        """In which its gradients are summed over ranks."""
        return _if_floating(declared, self.gradients) if self.gradients is not None else self.kept(declared, dims)

    def other(self, declared: torch.dtype) -> torch.dtype:
        """The dtype of a buffer or an input."""
        return _if_floating(declared, self.others)


def dtypes_of(precision: Precision, execution: Execution) -> StepDtypes:
    """What ``precision`` means under ``execution``; also where programs cannot run in it (float16, narrow products).

    With autocast as :func:`hgc.runtime.precision.read_precision`. Without, the model is in the dtype that it computes in, all of it, and
    what the optimizer updates (``master``, or else ``parameters``) is another copy.
    """
    computed = precision.compute or precision.parameters
    gradients = _dtype(precision.gradients)
    if execution.autocast:
        kept = precision.parameters or ("" if computed in _NARROW else computed)
        narrow = kept in _NARROW
        autocast = _dtype(computed if computed in _NARROW else "")
        return StepDtypes(_dtype(kept), _dtype(precision.master), _dtype("float32" if narrow else kept), autocast, gradients, narrow)
    stored = precision.master or precision.parameters
    return StepDtypes(_dtype(computed), _dtype(stored if stored != computed else ""), _dtype(computed), None, gradients)


def _if_floating(declared: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and declared.is_floating_point else declared


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None

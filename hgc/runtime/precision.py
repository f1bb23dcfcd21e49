"""What the words of a :class:`~hgc.plan.Precision` mean for a running program."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hgc.errors import PlanError
from hgc.plan import Precision

_NARROW = ("bfloat16", "float16")


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of a training step; ``None`` keeps what the program declares.

    ``parameters``: what the model computes with; if 16 bits wide, vectors (norms, biases) are kept in ``others``. ``master``: what the
    optimizer updates and checkpoints hold, where it differs from that. ``others``: buffers and floating inputs. ``autocast``: what torch's
    autocast computes products in. ``gradients``: in which gradients are summed.
    """

    parameters: torch.dtype | None = None
    master: torch.dtype | None = None
    others: torch.dtype | None = None
    autocast: torch.dtype | None = None
    gradients: torch.dtype | None = None

    @property
    def narrow(self) -> bool:
        """Are matrices kept in 16 bits, and vectors not?"""
        return self.parameters is not None and self.parameters.itemsize < 4

    def kept(self, declared: torch.dtype, dims: int) -> torch.dtype:
        """What the model holds of a parameter that is declared with this dtype and so many dims."""
        wanted = self.others if self.narrow and dims < 2 else self.parameters
        return wanted if wanted is not None and declared.is_floating_point else declared

    def stored(self, declared: torch.dtype, dims: int) -> torch.dtype:
        """What the optimizer updates of it."""
        return self.master if self.master is not None and declared.is_floating_point else self.kept(declared, dims)

    def summed(self, declared: torch.dtype, dims: int) -> torch.dtype:
        """In which its gradients are summed over ranks."""
        return self.gradients if self.gradients is not None and declared.is_floating_point else self.kept(declared, dims)

    def other(self, declared: torch.dtype) -> torch.dtype:
        """The dtype of a buffer or an input."""
        return self.others if self.others is not None and declared.is_floating_point else declared

    def computing(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """What a forward pass runs in."""
        return contextlib.nullcontext() if self.autocast is None else torch.autocast(device.type, self.autocast)

    def input(self, tensor: Tensor) -> Tensor:
        """An input of the model as it is computed with."""
        return tensor.to(self.other(tensor.dtype))


def read_precision(precision: Precision) -> Dtypes:
    """The dtypes that a precision means. Raises ``PlanError`` for one that programs cannot run in.

    Computing in 16 bits (``compute``, or parameters that are kept so) is torch's autocast: products in 16 bits, what loses too much (norms,
    softmax, loss) in float32; vectors, buffers and inputs stay as wide as float32. Any wider dtype holds for everything.
    """
    _check(precision)
    computed = precision.compute or precision.parameters
    narrow = computed in _NARROW
    kept = precision.parameters or ("" if narrow else computed)
    return Dtypes(
        parameters=_dtype(kept),
        master=_dtype(precision.master),
        others=_dtype("float32" if kept in _NARROW else kept),
        autocast=_dtype(computed) if narrow else None,
        gradients=_dtype(precision.gradients),
    )


def _check(precision: Precision) -> None:
    if precision.products:
        raise PlanError(f"products in {precision.products} are known to costs only, programs cannot run them; leave products out")
    for field in ("compute", "parameters", "gradients"):
        if getattr(precision, field) == "float16":
            raise PlanError(f"{field} float16 needs its loss scaled, which programs do not do; use bfloat16")
    if precision.compute not in ("", *_NARROW) and precision.parameters not in ("", precision.compute):
        raise PlanError(
            f"compute {precision.compute} with parameters {precision.parameters} would convert every parameter at every use; "
            f"give both the same dtype, or compute bfloat16"
        )
    kept = precision.parameters or ("" if precision.compute in _NARROW else precision.compute)
    if precision.master and kept and _width(precision.master) < _width(kept):
        raise PlanError(f"master {precision.master} is narrower than parameters {kept}, so a copy of them gains nothing; leave master out")


def _dtype(name: str) -> torch.dtype | None:
    return getattr(torch, name) if name else None


def _width(name: str) -> int:
    return int(torch.finfo(getattr(torch, name)).bits)

"""What the optimizer sees of a parameter: this rank's share, as one plain tensor of the dtype that it updates."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hgc.runtime.precision import Dtypes
from hgc.runtime.state import Entry, plain


class Share:
    """``parameter`` is the share; the model holds the same tensor, a DTensor of FSDP2 over the same memory, or a copy in another dtype.

    Where they are two, gradients are handed over after backward (``after_backward``) and a copy follows before forward (``refresh``).
    """

    def __init__(self, entry: Entry, dtypes: Dtypes) -> None:
        held = entry.module_tensor()
        assert isinstance(held, nn.Parameter)
        declared = entry.declared.dtype, len(entry.layout.shape)
        self._sharded = isinstance(held.data, DTensor)
        self._copied = False
        self._before: Tensor | None = None
        if self._sharded:
            self.parameter = nn.Parameter(plain(held), requires_grad=held.requires_grad)
        elif not held.requires_grad or dtypes.stored(*declared) == dtypes.kept(*declared) == dtypes.summed(*declared):
            if held.dtype != dtypes.kept(*declared):
                held = nn.Parameter(held.detach().to(dtypes.kept(*declared)), requires_grad=False)
                entry.put(held)
            self.parameter = held
        else:
            self.parameter = held
            self._copied = held.dtype != dtypes.kept(*declared)
            held = nn.Parameter(held.detach().to(dtypes.kept(*declared)))  # over the same memory if only the gradient's dtype differs
            held.grad_dtype = _accumulated(held.dtype, dtypes.summed(*declared))
            entry.put(held)
        self.held = held

    def refresh(self) -> None:
        """Before a forward pass: the model computes with what the optimizer has made."""
        if self._copied:
            with torch.no_grad():
                self.held.copy_(self.parameter)

    def before_backward(self) -> None:
        """Before the first micro-batch; gradients that are still there are added to."""
        if self._sharded:
            if self.parameter.grad is None:
                self.held.grad = None
        elif self.held is not self.parameter:
            self.held.requires_grad_(self.parameter.requires_grad)
            # it may live in a bucket that is about to be overwritten
            self._before = None if self.parameter.grad is None else self.parameter.grad.clone()
            self.parameter.grad = None

    def after_backward(self) -> None:
        """After the last one: hand over the gradient."""
        gradient = self.held.grad
        if self._sharded:
            self.parameter.grad = None if gradient is None else plain(gradient)
        elif self.held is not self.parameter:
            self.held.grad = None
            new, before, self._before = None if gradient is None else gradient.to(self.parameter.dtype), self._before, None
            self.parameter.grad = before if new is None else new if before is None else before.add_(new)


def _accumulated(held: torch.dtype, summed: torch.dtype) -> torch.dtype | None:
    """The dtype in which autograd adds up micro-batches: the wider one; ``None`` lets a gradient be replaced by a narrower sum."""
    return summed if torch.finfo(summed).bits > torch.finfo(held).bits else None

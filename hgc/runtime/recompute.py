"""Keep a function's arguments instead of what it saves for backward, and run it again when backward gets there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hgc._torch_compat import function_modes
from hgc.ir.ops import groups, random


def recompute(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments stay in memory until backward.

    Backward runs the function again up to the last value that it needs, collectives in front of it too, with the random numbers, the
    autocast and the groups of the first time. Buffers that the function updates (statistics of a batch norm) are updated once.
    """
    if torch.compiler.is_compiling():
        return checkpoint(function, *args, use_reentrant=False, **kwargs)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    again = _Again(function, groups.current(), random.get_state() if random.has_own_root() else None)
    return checkpoint(
        function,
        *args,
        use_reentrant=False,
        # ranks that are threads share torch's own generators: to restore one for this rank would disturb the others
        preserve_rng_state=not (random.has_own_root() and groups.is_distributed()),
        context_fn=lambda: (nullcontext(), again),
        **kwargs,
    )


class _Again:
    """The circumstances of the second run: groups, function modes and random numbers of the first, and buffers that may be thrown away."""

    def __init__(self, function: Callable[..., Any], table: Mapping[str, groups.Group], random_state: Tensor | None) -> None:
        self._function, self._table, self._random_state = function, table, random_state
        self._modes = function_modes()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(groups.use(self._table))
            for mode in self._modes if not function_modes() else ():
                stack.enter_context(mode)
            if self._random_state is not None:
                stack.callback(random.set_state, random.get_state())
                random.set_state(self._random_state)
            if isinstance(self._function, nn.Module):
                _lend_buffers(self._function, stack)
            self._entered = stack.pop_all()

    def __exit__(self, *failure: object) -> None:
        self._entered.close()


def _lend_buffers(module: nn.Module, stack: ExitStack) -> None:
    """Copies in place of the module's buffers until ``stack`` closes."""
    for holder in module.modules():
        for name, buffer in list(holder._buffers.items()):
            if buffer is not None:
                stack.callback(holder._buffers.__setitem__, name, buffer)
                holder._buffers[name] = buffer.clone()

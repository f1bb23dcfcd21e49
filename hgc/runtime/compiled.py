"""torch.compile for the bodies of blocks: once for each body, however many blocks have it."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from hgc.runtime.modules import Block, Model


def compile_blocks(model: Model, backend: str | Callable[..., Any] = "inductor") -> None:
    """Let every block run its compiled ``forward``; blocks of one class share what is compiled, for fixed sizes of the batch.

    Hooks (FSDP2) and recomputation stay outside of what is compiled; another size of the batch compiles every body again.
    """
    compiled: dict[Any, Any] = {}
    for module in model.modules():
        forward = type(module).forward
        if isinstance(module, Block) and forward is not Block.forward:
            if forward not in compiled:
                compiled[forward] = torch.compile(forward, dynamic=False, backend=backend)
            module.forward = MethodType(compiled[forward], module)

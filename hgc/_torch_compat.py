"""Every private or unstable torch interface that hgc uses, in one place; tests/test_torch_compat.py proves each entry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # noqa: F401  (registers the operators below)

# The operators, not their Python wrappers: wrappers were renamed in 2.13, and these carry no surprise below autograd.
functional_collectives: Any = torch.ops._c10d_functional


@contextmanager
def threaded_world() -> Iterator[Any]:
    """Let the threads started inside be the ranks of a process group (backend ``"threaded"``), for tests.

    Yields a function that a failing rank calls with its exception, so that the other ranks leave their collectives.
    """
    # Each thread needs its own registry of groups and its own default group; torch offers that to its own tests only.
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()  # type: ignore[no-untyped-call]
    try:
        yield threaded.ProcessLocalGroup.exception_handle
    finally:
        threaded.ProcessLocalGroup.reset()  # type: ignore[no-untyped-call]
        threaded._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
        torch._C._distributed_c10d._set_thread_isolation_mode(False)


def threaded_store() -> dist.Store:
    """A store that threads of one process share."""
    return dist.HashStore()

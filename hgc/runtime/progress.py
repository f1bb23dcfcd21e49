"""One line for each step, on rank 0."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping

import torch
from torch import Tensor

from hgc.runtime.batches import LocalBatch
from hgc.runtime.mesh import Mesh
from hgc.runtime.plan_info import PlanInfo


class Progress:
    """Prints step, loss, norm of the gradient, throughput since the last line, and peak memory of this process."""

    def __init__(self, mesh: Mesh, plan: PlanInfo, every: int) -> None:
        self._mesh, self._plan, self._every = mesh, plan, every
        self._since_s = time.perf_counter()
        self._amount = 0

    def step(self, step: int, loss: Tensor, norm: Tensor, batch: Mapping[str, Tensor]) -> None:
        """Count a step; reads the loss from the device only where a line is due."""
        amount, unit = self._count(batch)
        self._amount += amount
        if self._mesh.rank != 0 or (step % self._every and step != 1):
            return
        loss_value, norm_value = float(loss), float(norm)  # waits for the device, so the clock is read afterwards
        now_s = time.perf_counter()
        rate = self._amount / (now_s - self._since_s)
        self._since_s, self._amount = now_s, 0
        print(
            f"step: {step:>4}  loss: {loss_value:8.4f}  grad_norm: {norm_value:8.4f}  "
            f"{unit}: {rate:,.0f}  memory: {self._memory_gib():.2f} GiB",
            flush=True,
        )

    def _count(self, batch: Mapping[str, Tensor]) -> tuple[int, str]:
        """Tokens of the global batch where there is a sequence, else samples."""
        batch_symbol, sequence = self._plan.symbol("batch"), self._plan.symbol("sequence")
        amount, counted = 1, set[str]()
        tokens = False
        for name, declared in self._plan.inputs.items():
            for dim, entry in enumerate(declared.shape):
                if isinstance(entry, str) and entry in (batch_symbol, sequence) and entry not in counted:
                    counted.add(entry)
                    tokens |= entry == sequence
                    ranks = 1
                    if isinstance(batch, LocalBatch):
                        for axis, placement in declared.shards():
                            ranks *= self._mesh.sizes[axis] if placement.dim == dim else 1
                    amount *= batch[name].size(dim) * ranks
        return amount, "tokens/s" if tokens else "samples/s"

    def _memory_gib(self) -> float:
        if self._mesh.device.type == "cuda":
            return torch.cuda.max_memory_reserved(self._mesh.device) / 2**30
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

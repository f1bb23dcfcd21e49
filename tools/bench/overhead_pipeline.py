"""The pipeline that an expert writes by hand for Llama: its layers cut up, played by torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from hgc.plan import Plan
from hgc.tools.bench.overhead_baselines import LossAndBackward
from hgc.tools.bench.overhead_models import Batch

SINGLE = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


def by_hand(model: Any, plan: Plan) -> tuple[LossAndBackward, nn.Module]:
    """The plan's cuts, schedule and micro-batches, with one rank for each place; the mean over ranks of what it returns is the loss."""
    rank, world = dist.get_rank(), dist.get_world_size()
    counts = [stage.blocks for stage in plan.stages]
    own = [index for index, stage in enumerate(plan.stages) if stage.first_rank == rank]
    modules = [_Part(model, counts, index) for index in own]
    stages = [PipelineStage(part, index, len(counts), torch.device("cpu")) for index, part in zip(own, modules, strict=True)]
    schedule: Any
    if plan.schedule == "interleaved":
        schedule = ScheduleInterleaved1F1B(stages, plan.micro_batches, loss_fn=_loss)  # type: ignore[arg-type]
    else:
        schedule = SINGLE[plan.schedule](stages[0], plan.micro_batches, loss_fn=_loss)
    first, last = 0 in own, len(counts) - 1 in own

    def loss_and_backward(batch: Batch) -> Tensor:
        losses: list[Tensor] = []
        given = (batch["input_ids"],) if first else ()
        target = {"target": batch["labels"], "losses": losses} if last else {}
        schedule.step(*given, **target)
        return torch.stack(losses).mean().detach() * world if last else torch.zeros(())

    return loss_and_backward, nn.ModuleList(modules)


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    targets = F.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    return F.cross_entropy(logits.flatten(0, 1), targets)


class _Part(nn.Module):
    """Blocks of a Llama, counted with the embedding as the first and the head as the last."""

    def __init__(self, model: Any, counts: Sequence[int], index: int) -> None:
        super().__init__()
        start, end = sum(counts[:index]), sum(counts[: index + 1])
        layers = model.model.layers
        self.table = model.model.embed_tokens if start == 0 else None
        self.layers = layers[max(start - 1, 0) : min(end - 1, len(layers))]
        self.rotary = model.model.rotary_emb
        is_last = end == len(layers) + 2
        self.norm = model.model.norm if is_last else None
        self.head = model.lm_head if is_last else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.table(x) if self.table is not None else x
        positions = torch.arange(hidden.size(1)).unsqueeze(0)
        angles = self.rotary(hidden, positions) if len(self.layers) else None
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=angles)
        return self.head(self.norm(hidden)) if self.head is not None and self.norm is not None else hidden

"""Parameters that several stages hold (an embedding and the head tied to it): each has a copy, and all add up one another's gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hgc.runtime.executor_exchange import Transfer, transfers
from hgc.runtime.executor_messages import pack, unpack
from hgc.runtime.executor_transport import Handle, Transport, wait
from hgc.runtime.mesh import Mesh
from hgc.runtime.pipeline_info import PipelineInfo
from hgc.runtime.pipeline_stage import StageTrainer
from hgc.runtime.shards import Box, Layout, all_coordinates, boxes


@dataclass(frozen=True)
class _Way:
    """How the gradient of one parameter goes from one holder's ranks to another's."""

    name: str
    source: int
    target: int
    transfers: tuple[Transfer, ...]


class TiedGradients:
    """Sums gradients over the stages that hold a parameter, after each has summed over its own ranks.

    ``holders``: name -> stages, those with several. All ranks must make it at the same time. Every copy gets the same sum, taken in the
    order of the stages, so that copies stay equal bit for bit.
    """

    def __init__(
        self,
        holders: Mapping[str, tuple[int, ...]],
        plan: PipelineInfo,
        stages: Mapping[int, StageTrainer],
        transport: Transport,
        mesh: Mesh,
    ) -> None:
        self._stages, self._transport, self._rank, self._device = stages, transport, mesh.rank, mesh.device
        self._holders = {name: found for name, found in holders.items() if len(found) > 1}
        self._ways: list[_Way] = []
        self._before: dict[tuple[str, int], Tensor] = {}
        if self._holders:
            layouts = _layouts_of_all(stages, self._holders)
            self._holders = {name: found for name, found in self._holders.items() if (name, found[0]) in layouts}
            for name, found in sorted(self._holders.items()):
                self._ways += [_way(name, a, b, plan, layouts) for a in found for b in found if a != b and {a, b} & stages.keys()]

    def begin(self) -> None:
        """Before a step: gradients of earlier ones are summed already."""
        self._before = {}
        for name, stage, parameter in self._parameters():
            if parameter.grad is not None:
                self._before[name, stage] = parameter.grad
                parameter.grad = None

    @torch.no_grad()
    def add_up(self) -> None:
        """After the step's last backward, on all ranks."""
        sent = [self._send(way) for way in self._ways if way.source in self._stages]
        own = {(name, stage): _gradient(parameter).clone() for name, stage, parameter in self._parameters()}
        arrived = {(way.name, way.source, way.target): self._receive(way, own) for way in self._ways if way.target in self._stages}
        for name, stage, parameter in self._parameters():
            parts = [own[name, stage] if other == stage else arrived[name, other, stage] for other in self._holders[name]]
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            before = self._before.pop((name, stage), None)
            parameter.grad = total if before is None else total.add_(before)
        for handles in sent:
            for handle, _, target in handles:
                wait(handle, "a tied gradient to", target)

    def _parameters(self) -> Iterable[tuple[str, int, nn.Parameter]]:
        for name, found in sorted(self._holders.items()):
            for stage in found:
                if stage in self._stages:
                    yield name, stage, self._stages[stage].parameter(name)

    def _send(self, way: _Way) -> list[tuple[Handle, Tensor, int]]:
        local = _gradient(self._stages[way.source].parameter(way.name))
        mine = [t for t in way.transfers if t.source == self._rank and t.target != self._rank]
        packed = [(pack(local, transfer), transfer.target) for transfer in mine]
        return [(self._transport.send(tensor, target), tensor, target) for tensor, target in packed]

    def _receive(self, way: _Way, own: Mapping[tuple[str, int], Tensor]) -> Tensor:
        local = torch.zeros_like(own[way.name, way.target])
        posted = []
        for transfer in (t for t in way.transfers if t.target == self._rank):
            if transfer.source == self._rank:
                unpack(pack(own[way.name, way.source], transfer), transfer, local)
            else:
                buffer = torch.empty(transfer.numel, dtype=local.dtype, device=self._device)
                posted.append((self._transport.receive(buffer, transfer.source), buffer, transfer))
        for handle, buffer, transfer in posted:
            wait(handle, f"the gradient of tied {way.name!r} from", transfer.source)
            unpack(buffer, transfer, local)
        return local


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _layouts_of_all(stages: Mapping[int, StageTrainer], names: Iterable[str]) -> dict[tuple[str, int], Layout]:
    """(name, stage) -> how a copy lies on its stage's mesh, told by the ranks that have it."""
    own = {(name, index): layout for name in names for index, stage in stages.items() if (layout := stage.layout(name)) is not None}
    found: list[dict[tuple[str, int], Layout]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, own)
    return {key: layout for theirs in found for key, layout in theirs.items()}


def _way(name: str, source: int, target: int, plan: PipelineInfo, layouts: Mapping[tuple[str, int], Layout]) -> _Way:
    def held(stage: int) -> list[tuple[Box, ...]]:
        mesh = plan.stages[stage].mesh
        return [boxes(layouts[name, stage], mesh, where) for where in all_coordinates(tuple(mesh), mesh)]

    a, b = plan.stages[source].first_rank, plan.stages[target].first_rank
    return _Way(name, source, target, transfers(a, held(source), b, held(target)))

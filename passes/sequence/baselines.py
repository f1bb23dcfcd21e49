"""What others do with unlike lengths, under the same costs: groups of one degree, for a whole run or for a batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from hgc.errors import PlanError
from hgc.passes.sequence.costs import Fleet, Numbers, Rates, SequenceCosts
from hgc.passes.sequence.groups import Packed, SequencePlan
from hgc.passes.sequence.micro_batch import spread
from hgc.passes.sequence.planner import checked

FULL = 0.9
"""How full of tokens packs are made."""


def ulysses(lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet, longest: int) -> SequencePlan:
    """DeepSpeed-Ulysses: one degree for a run, the smallest that holds a sequence of ``longest`` tokens; best-fit-decreasing packs."""
    fitting = [degree for degree in fleet.degrees if degree * costs.tokens_per_device >= longest]
    if not fitting:
        raise PlanError(f"{fleet.degrees[-1]} devices hold no sequence of {longest} tokens; use more devices or shorter sequences")
    return _of_degree(checked(lengths, costs, fleet), costs, fleet, fitting[0])


def batch_adaptive(lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet) -> SequencePlan:
    """The best single degree for this batch."""
    given = checked(lengths, costs, fleet)
    fitting = [degree for degree in fleet.degrees if degree * costs.tokens_per_device >= given.max()]
    return min((_of_degree(given, costs, fleet, degree) for degree in fitting), key=lambda plan: plan.seconds)


def _of_degree(lengths: Numbers, costs: SequenceCosts, fleet: Fleet, degree: int) -> SequencePlan:
    packs = packs_of(lengths, max(FULL * degree * costs.tokens_per_device, float(lengths.max())))
    groups = fleet.most_groups(degree)
    rates, index = costs.rates(fleet.degrees), fleet.degrees.index(degree)
    micro_batches = []
    for first in range(0, len(packs), groups):
        together = packs[first : first + groups]
        if len(together) < groups:
            together = _respread(together, lengths, rates, index, groups)
        packed = Packed((index,) * len(together), tuple(map(tuple, together)))
        micro_batches.append(packed.micro_batch(lengths, np.arange(len(lengths)), rates, fleet, 0.0))
    return SequencePlan(tuple(micro_batches), costs.sharding.step_s)


def _respread(packs: list[list[int]], lengths: Numbers, rates: Rates, degree: int, groups: int) -> list[list[int]]:
    """The last micro-batch's sequences over all groups, longest first to the least busy, where memory allows."""
    members = sorted((i for pack in packs for i in pack), key=lambda i: -lengths[i])
    found = spread(lengths[members], rates, degree, groups)
    return packs if found is None else [[members[i] for i in group] for group in found[1].members]


def packs_of(lengths: Numbers, most: float) -> list[list[int]]:
    """Best-fit decreasing: packs of at most ``most`` tokens, in the order in which they were opened."""
    packs: list[list[int]] = []
    room = np.zeros(0)
    for i in np.argsort(-lengths, kind="stable"):
        s = lengths[i]
        left = np.where(room >= s, room - s, np.inf)
        if len(left) and np.isfinite(left.min()):
            place = int(left.argmin())
        else:
            place, room = len(packs), np.append(room, most)
            packs.append([])
        packs[place].append(int(i))
        room[place] -= s
    return packs


@dataclass(frozen=True)
class Shape:
    """Of a transformer: ``node_bytes_s`` is what all devices of a node together send to other nodes, in bytes/s."""

    hidden: int
    layers: int
    node_bytes_s: float
    tensor_bytes_s: float


def megatron(lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet, longest: int, shape: Shape) -> float:
    """Seconds of Megatron-LM with the best static tensor-parallel degree of a node and context-parallel degree that holds ``longest``.

    Tensor parallelism with sequence parallelism moves 8 activations forward and backward for each layer and token of a rank's
    part, not overlapped; the ring sends keys and values once forward and twice backward, beside attention.
    """
    given = checked(lengths, costs, fleet)
    tp = min(fleet.node_devices, fleet.devices)
    found = []
    for cp in (2**k for k in range(fleet.devices.bit_length())):
        degree = tp * cp
        if degree <= fleet.devices and degree * costs.tokens_per_device >= longest:
            found.append(_megatron(given, costs, fleet, tp, cp, shape))
    if not found:
        raise PlanError(f"{fleet.devices} devices hold no sequence of {longest} tokens; use more devices or shorter sequences")
    return min(found)


def _megatron(lengths: Numbers, costs: SequenceCosts, fleet: Fleet, tp: int, cp: int, shape: Shape) -> float:
    degree = tp * cp
    packs = packs_of(lengths, max(FULL * degree * costs.tokens_per_device, float(lengths.max())))
    groups, total = fleet.devices // degree, costs.sharding.step_s

    def seconds(pack: list[int]) -> float:
        s = lengths[pack]
        attention = costs.quadratic_s * float(s @ s) / degree
        tensor = 8 * 2 * shape.hidden * shape.layers * float(s.sum()) / cp * (tp - 1) / tp / shape.tensor_bytes_s
        ring = 3 * 4 * shape.hidden * shape.layers * float(s.sum()) * (cp - 1) / cp / tp / (shape.node_bytes_s / fleet.node_devices)
        return costs.fixed_s + costs.sharding.micro_batch_s + costs.linear_s * float(s.sum()) / degree + tensor + max(attention, ring)

    for first in range(0, len(packs), groups):
        total += max(seconds(pack) for pack in packs[first : first + groups])
    return total

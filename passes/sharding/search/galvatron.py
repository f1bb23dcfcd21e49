"""Galvatron's own cost model on plain numbers, to compare searches under one and the same model.

Formulas of the VLDB'23 paper (section 3.2) and of release 2.4.0: backward takes twice forward's time, recomputation adds one forward; a
tensor-parallel layer has all-reduces that never overlap; gradients overlap with backward, and both run slower while they do; ZeRO 3
adds a forward gather that never overlaps. Model states are 16 bytes a parameter, less by what is sharded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hgc.errors import PlanError
from hgc.passes.sharding.search.pipeline import Pipeline, StagePlan
from hgc.passes.sharding.search.problem import Numbers
from hgc.passes.sharding.search.space import Tree

_STATES = 4
"""Parameter, gradient and two moments, in float32."""
_SHARD_RESIDUE = 0.003
"""Release 2.4.0 counts this share of the states beside the rank's own with ZeRO."""


@dataclass(frozen=True)
class Layer:
    """A profiled layer.

    Args:
        forward_s: of one sample on one device; ``launch_s``: of a batch of none (a line through profiled batches).
        parameter_bytes: in float32.
        activation_bytes: tensor-parallel degree -> what one sample keeps for backward.
        boundary_bytes: what one sample keeps with recomputation.
        output_bytes: of one sample, as it is sent.
        all_reduces: in forward and backward together with tensor parallelism (4; 6 with cross attention).
    """

    forward_s: float
    parameter_bytes: float
    activation_bytes: Mapping[int, float]
    boundary_bytes: float
    output_bytes: float
    launch_s: float = 0.0
    all_reduces: int = 4


@dataclass(frozen=True)
class Ends:
    """What is in front of the layers and behind them (embedding, output layer, loss), split over the vocabulary by ``vocabulary_tp`` ranks.

    Of a plan the engine chooses one such degree. States and activations are profiled by degree, and apart by where the ends are.

    Args:
        forward_s: of one sample on one device, both ends together; ``launch_s``: of a batch of none. Each end takes half.
        alone, first, last: degree -> (bytes of states, bytes that one sample keeps), of both ends in one stage, and of each in its own.
        output_bytes: of one sample between layers.
    """

    forward_s: float
    alone: Mapping[int, tuple[float, float]]
    first: Mapping[int, tuple[float, float]]
    last: Mapping[int, tuple[float, float]]
    output_bytes: float
    launch_s: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Measured bandwidths (bytes a second, as nccl-tests' bus bandwidth) of a number of devices.

    ``all_reduce``: (ranks, are they neighbours) -> bandwidth; ``messages``: number of stages -> bandwidth between neighbours.
    ``overlap``: how many times longer compute and communication take while they overlap.
    """

    devices: int
    all_reduce: Mapping[tuple[int, bool], float]
    messages: Mapping[int, float]
    overlap: float

    def seconds(self, payload_bytes: float, ranks: int, neighbours: bool) -> float:
        """Of an all-reduce: each rank sends ``2 (n - 1) / n`` of the payload."""
        if ranks == 1:
            return 0.0
        bandwidth = self.all_reduce.get((ranks, neighbours)) or self.all_reduce.get((ranks, True))
        if bandwidth is None:
            raise PlanError(f"the machine has no bandwidth of {ranks} ranks; measure it, or leave out trees with groups of {ranks}")
        return 2 * (ranks - 1) / ranks * payload_bytes / bandwidth


@dataclass(frozen=True)
class Training:
    """``samples``: of the global batch; ``gradient_bytes``: of a parameter on its way (4, or 2 in bfloat16); ``zero2``: do plain
    data-parallel layers shard gradients and optimizer state, as release 2.4.0 has it by default?"""

    samples: int
    micro_batches: int
    gradient_bytes: int = 4
    zero2: bool = False


def pipeline(
    layers: Sequence[Layer],
    found: Sequence[Tree],
    machine: Machine,
    training: Training,
    limit_bytes: float,
    ends: Ends | None = None,
    vocabulary_tp: int = 1,
) -> Pipeline:
    """The search problem of layers and trees of one pipeline degree. With ``ends`` the first and the last block are these, alike under
    all trees; raises :class:`PlanError` for a ``vocabulary_tp`` that was not profiled."""
    stages = found[0].stages
    kinds = {id(layer): number for number, layer in enumerate({id(layer): layer for layer in layers}.values())}
    numbers = {id(layer): np.array([_numbers(layer, tree, machine, training, len(layers)) for tree in found]) for layer in layers}
    table = np.array([numbers[id(layer)] for layer in layers])
    kind_of = [kinds[id(layer)] for layer in layers]
    if ends is not None:
        around = [np.broadcast_to(each, (1, len(found), 4)) for each in _ends(ends, stages, vocabulary_tp, machine, training)]
        table = np.concatenate([around[0], table, around[1]])
        kind_of = [len(kinds), *kind_of, len(kinds) + 1]
    switch_s = np.array([[_switch_s(layers[0], a, b, machine, training) for b in found] for a in found])
    return Pipeline(
        micro_s=table[:, :, 0],
        last_s=table[:, :, 1],
        state=table[:, :, 2],
        saved=table[:, :, 3],
        passing=np.zeros(table.shape[:2]),
        switch_s=switch_s,
        stages=stages,
        micro_batches=training.micro_batches,
        limit=limit_bytes,
        kinds=tuple(kind_of),
    )


def _numbers(layer: Layer, tree: Tree, machine: Machine, training: Training, count: int) -> tuple[float, float, float, float]:
    """Of one of ``count`` layers: time of a micro-batch, what the last one takes longer, state, and what a micro-batch saves."""
    tp = tree.degree("tp")
    samples = training.samples / training.micro_batches / tree.data
    if samples < 1 or tp not in layer.activation_bytes:
        return np.inf, 0.0, 0.0, 0.0
    forward_s = layer.launch_s + layer.forward_s * samples / tp
    backward_s = (3 if tree.recompute else 2) * forward_s
    payload = layer.all_reduces * samples * layer.output_bytes * (1.5 if tree.recompute else 1)
    others_s = machine.seconds(payload, tp, tree.is_tp_consecutive)
    others_s += _messages_s(layer, tree, machine, samples) / count
    sum_s = machine.seconds(layer.parameter_bytes / 4 * training.gradient_bytes / tp, tree.data, not tree.is_tp_consecutive or tp == 1)
    gather_s = sum_s / 2 if tree.degree("sdp") > 1 else 0.0
    micro_s = forward_s + backward_s + others_s + gather_s
    last_s = _overlapped(backward_s, sum_s, machine.overlap, half=tp >= tree.data * tp / 2 and tree.data > 1) - backward_s
    kept = layer.boundary_bytes if tree.recompute else layer.activation_bytes[tp]
    return micro_s, last_s, _STATES * layer.parameter_bytes / tp * _state_share(tree, training), samples * kept


def _ends(ends: Ends, stages: int, tp: int, machine: Machine, training: Training) -> tuple[Numbers, Numbers]:
    """[4] of each end, as :func:`_numbers`; with one stage the first has the memory of both.

    An end exchanges its hidden states once each way among the ranks of ``tp``: gathered and scattered, together an all-reduce.
    """
    data = machine.devices // stages // tp
    profiled = (ends.alone,) if stages == 1 else (ends.first, ends.last)
    if any(tp not in each for each in profiled) or data < 1:
        raise PlanError(f"embedding and output layer have no profile for {tp} ranks in {stages} stages; use one of {sorted(profiled[0])}")
    samples = training.samples / training.micro_batches / data
    forward_s = (ends.launch_s + ends.forward_s * samples / tp) / 2
    exchange_s = machine.seconds(samples * ends.output_bytes, tp, neighbours=True)
    found = []
    for states, kept in (*(each[tp] for each in profiled), (0.0, 0.0))[:2]:
        sum_s = machine.seconds(states / _STATES / 4 * training.gradient_bytes, data, tp == 1)
        last_s = _overlapped(2 * forward_s, sum_s, machine.overlap, half=False) - 2 * forward_s
        share = _share(data, sharded=False, training=training)
        found.append(np.array([3 * forward_s + exchange_s, last_s, states * share, samples * kept]))
    return found[0], found[1]


def engine_step_s(stages: Sequence[StagePlan], micro_batches: int) -> float:
    """The formula of release 2.4.0, which sees the first and the last stage only; forward is a third of a micro-batch.

    Longer stages between them are free in it, so it prices unbalanced cuts too low: for comparison with what the engine prints.
    """
    times, whole = [stage.micro_s for stage in stages], [stage.whole_s for stage in stages]
    count, first, others = len(stages), times[0], sum(times[1:])
    fill_s = max(min(count - 1, micro_batches - 1) * first / 3, others / 3)
    drain_s = 2 * fill_s
    steady_s = fill_s + drain_s + first * max(0, micro_batches + 1 - count)
    late_s = max(each - sum(times[: index + 1]) for index, each in enumerate(whole))
    return max(sum(times) + (micro_batches - 1) * times[-1], steady_s) + max(0.0, late_s)


def _messages_s(layer: Layer, tree: Tree, machine: Machine, samples: float) -> float:
    """All messages of a micro-batch, forward and backward, which the engine spreads over all layers."""
    if tree.stages == 1:
        return 0.0
    if tree.stages not in machine.messages:
        raise PlanError(f"the machine has no bandwidth between {tree.stages} stages; measure it, or leave out this pipeline degree")
    return 2 * tree.stages * samples * layer.output_bytes / machine.messages[tree.stages]


def _overlapped(compute_s: float, sum_s: float, overlap: float, half: bool) -> float:
    """Both run ``overlap`` times slower while they run together; ``half``: of the compute only a half can overlap."""
    together = compute_s / 2 if half else compute_s
    if overlap * sum_s > overlap * together:
        return compute_s - together + overlap * together + (sum_s - together)
    return compute_s - together + overlap * sum_s + (together - sum_s)


def _state_share(tree: Tree, training: Training) -> float:
    return _share(tree.data, tree.degree("sdp") > 1, training)


def _share(data: int, sharded: bool, training: Training) -> float:
    """Of the 16 bytes a parameter; table of the release for one reduction a step. ``sharded``: ZeRO 3."""
    many = training.micro_batches > 1
    if sharded:
        share = 1 / data + _SHARD_RESIDUE
        wide = 7 / 8 if training.gradient_bytes == 2 else 3 / 4
        return wide * share + 1 - wide if many else share
    if training.zero2 and data > 1:
        share = 1 / data + _SHARD_RESIDUE
        wide = (6 if many else 7) / 8 if training.gradient_bytes == 2 else (2 if many else 3) / 4
        return wide * share + 1 - wide
    return 1.0


def _switch_s(layer: Layer, before: Tree, after: Tree, machine: Machine, training: Training) -> float:
    """Re-layout where the tensor-parallel degree grows: the larger group gathers what its members had apart."""
    wider = after.degree("tp")
    if wider <= before.degree("tp"):
        return 0.0
    samples = training.samples / training.micro_batches / after.data
    return machine.seconds(samples * layer.output_bytes, wider, after.is_tp_consecutive) / 2

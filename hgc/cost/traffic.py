"""What the runtime sends and moves beside the graph: sums of gradients, ZeRO's gathers and scatters, the optimizer's step.

``traffic`` lists collectives as ``hgc.runtime`` calls them; the bytes are the same in other frameworks that shard state alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sympy

from hgc.cluster import Device
from hgc.cost.collectives import Kind, Place, time_s
from hgc.cost.compute import ELEMENT_BYTES, memory_time_s
from hgc.cost.execution import EAGER, Execution
from hgc.cost.memory import optimizer_copies
from hgc.cost.shares import Shares, Unit, add
from hgc.ir.program import Program
from hgc.ir.value import Size
from hgc.plan import Precision
from hgc.strategy import Strategy

FORWARD, BACKWARD, LAST_BACKWARD, FIRST_FORWARD = "forward", "backward", "last backward", "first forward"
"""When a collective runs: in every micro-batch's forward or backward, or once a step in the first or last one."""

FOREACH_PASSES: dict[str, int] = {"sgd": 3, "momentum": 8, "adam": 18, "adamw": 20}
"""Tensors that ``torch.optim``'s default (foreach) implementation reads and writes for each parameter, counted in its source: each
operator of the update is a pass of its own over two to four tensors."""


@dataclass(frozen=True)
class Traffic:
    """A collective of the runtime. ``unit``: the block that it belongs to (``""``: the root unit, or a bucket of several).

    ``payload_bytes`` as nccl-tests counts, of one call; ``calls`` in a row.
    """

    name: str  # "gradients" | "parameters"
    collective: str  # "all_reduce" | "all_gather" | "reduce_scatter"
    axes: tuple[str, ...]
    payload_bytes: Size
    when: str
    unit: str = ""

    def seconds(self, where: Place) -> float:
        """``where``: the place of the group that spans ``axes``."""
        kind: Kind = self.collective  # type: ignore[assignment]
        return time_s(kind, float(self.payload_bytes), where)


def traffic(program: Program, strategy: Strategy, precision: Precision | None = None, execution: Execution = EAGER) -> tuple[Traffic, ...]:
    """The collectives of one step on one rank of a lowered program (or stage), in the order of forward, then of backward.

    * without ZeRO: an all-reduce for each bucket, over all data axes on which its parameters are whole, in the last backward;
    * ZeRO 1: a gather of each unit before its first forward, a reduce-scatter of its gradients in the last backward;
    * ZeRO 2: the reduce-scatter in every backward;
    * ZeRO 3: the gather in every forward, and again in every backward (the root unit stays whole in between).
    """
    shares = Shares(program, strategy, precision, execution)
    gathers = [_gather(shares, unit, FORWARD if shares.zero == 3 else FIRST_FORWARD) for unit in shares.units if unit.entries]
    found = list(gathers)
    for unit in reversed([unit for unit in shares.units if unit.entries]):
        if shares.zero == 3 and unit.name:
            found.append(_gather(shares, unit, BACKWARD))
        if any(entry.value.requires_grad for entry in unit.entries):
            found.append(_scatter(shares, unit))
    for axes, bucket in shares.buckets():
        found.append(Traffic("gradients", "all_reduce", axes, sympy.Integer(shares.bucket_bytes(bucket)), LAST_BACKWARD))
    return tuple(found)


def _gather(shares: Shares, unit: Unit, when: str) -> Traffic:
    return Traffic("parameters", "all_gather", shares.axes, shares.gathered_bytes(unit), when, unit.name)


def _scatter(shares: Shares, unit: Unit) -> Traffic:
    when = LAST_BACKWARD if shares.zero == 1 else BACKWARD
    return Traffic("gradients", "reduce_scatter", shares.axes, shares.summed_bytes(unit), when, unit.name)


def optimizer_bytes(
    program: Program,
    strategy: Strategy,
    precision: Precision | None = None,
    optimizer: str = "adamw",
    execution: Execution = EAGER,
    *,
    fused: bool = False,
    clipping: bool = False,
) -> Size:
    """Bytes that an optimizer step reads and writes on one rank.

    ``fused``: one kernel reads parameter, gradient and state and writes parameter and state; otherwise as torch's foreach optimizers.
    ``clipping``: the gradient's norm, and its scaling. A copy of the parameters in another dtype is written anew, and one for
    ``precision.products`` twice, as it is and transposed. Raises ``HgcError`` for an optimizer that is not known.
    """
    copies = optimizer_copies(optimizer)
    shares = Shares(program, strategy, precision, execution)
    passes = 3 + 2 * copies if fused else FOREACH_PASSES[optimizer]
    passes += 3 if clipping else 0
    total = add(shares.held_numel(entry) * shares.stored(entry) * passes for entry in shares.trained)
    total += add(shares.held_numel(e) * (shares.stored(e) + shares.kept(e)) for e in shares.trained if shares.has_copy(e))
    if precision is not None and precision.products:
        narrow = sympy.Rational(str(2 * ELEMENT_BYTES[precision.products]))
        matrices = [entry for entry in shares.trained if len(entry.value.shape) > 1]
        total += add(shares.local_numel(entry) * (shares.kept(entry) + narrow) for entry in matrices)
    return total


def optimizer_s(bytes_: float, device: Device, kernels: int = 1) -> float:
    """Seconds of an optimizer step that moves so many bytes: it is memory-bound."""
    return float(memory_time_s(device, bytes_, float(kernels)))


def traffic_s(found: Sequence[Traffic], place_of: Callable[[tuple[str, ...]], Place], micro_batches: int = 1) -> float:
    """Seconds of all of them in one step, one after the other. ``place_of``: axes -> where their group sits."""
    often = {FORWARD: micro_batches, BACKWARD: micro_batches, FIRST_FORWARD: 1, LAST_BACKWARD: 1}
    return sum(each.seconds(place_of(each.axes)) * often[each.when] for each in found)

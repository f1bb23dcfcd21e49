"""Stages as the simulator gets them, and what travels between them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from hgc.backends.simulator.census import Census
from hgc.backends.simulator.work import Message, Step
from hgc.cluster import Cluster
from hgc.cost.collectives import place, time_s
from hgc.cost.execution import Execution
from hgc.cost.places import group_place
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import HgcError
from hgc.ir.input_sizes import evaluate
from hgc.ir.placement import Shard
from hgc.ir.program import BODIES, RECEIVED, Program
from hgc.ir.value import Size, Value, info, value
from hgc.plan import Plan
from hgc.schedule.layout import Edge

Sizes = Mapping[sympy.Symbol, float]


@dataclass(frozen=True)
class StageProgram:
    """A lowered stage and its costs. ``received`` and ``results``: names of the values that it gets from other stages and hands on.

    Stages that do the same with other layers may share ``program`` and ``costs``, which are then looked at once, under names of their own.
    """

    program: Program
    costs: ProgramCosts
    received: tuple[str, ...] = ()
    results: tuple[str, ...] = ()


def received(program: Program) -> list[fx.Node]:
    """Placeholders of the values that a stage receives, in order."""
    return [node for node in program.inputs() if info(node).role == RECEIVED]


def number(expression: Size, sizes: Sizes) -> float:
    """The value of an expression; raises ``HgcError`` for a symbol that has no size."""
    missing = [symbol for symbol in expression.free_symbols if symbol not in sizes]
    if missing:
        raise HgcError(f"the size {str(missing[0])!r} is missing; give a number for each symbol of the program")
    return float(evaluate(expression, sizes))  # type: ignore[arg-type]  # it takes any numbers


@dataclass(frozen=True)
class Handed:
    """A value that crosses an edge: as its maker and its reader hold it, and the dtype in which it is computed."""

    maker: Value
    reader: Value
    dtype: torch.dtype


def handed(stages: Sequence[StageProgram]) -> dict[Edge, list[Handed]]:
    """Edge -> values that travel over it."""
    makers: dict[str, tuple[int, fx.Node]] = {}
    for index, stage in enumerate(stages):
        makers.update({name: (index, node) for name, node in zip(stage.results, stage.program.outputs(), strict=bool(stage.results))})
    found: dict[Edge, list[Handed]] = {}
    for index, stage in enumerate(stages):
        for name, node in zip(stage.received, received(stage.program), strict=True):
            source, made = makers[name]
            found.setdefault((source, index), []).append(Handed(value(made), value(node), _dtype(stages[source], made)))
    return found


def _dtype(stage: StageProgram, node: fx.Node) -> torch.dtype:
    """The dtype that a result of a block has in the precision of the costs."""
    if node.target is not operator.getitem:
        return value(node).dtype
    call, index = node.args
    assert isinstance(call, fx.Node)
    assert isinstance(index, int)
    return stage.costs.bodies[str(call.target).removeprefix(BODIES)].outputs[index].dtype


def messages(
    stages: Sequence[StageProgram], plan: Plan, cluster: Cluster, sizes: Sizes, execution: Execution
) -> dict[tuple[Edge, str], Message]:
    """What travels over each edge: values forward, the gradients of those that have one back."""
    found: dict[tuple[Edge, str], Message] = {}
    for edge, values in handed(stages).items():
        for way in "FB":
            travelling = [each for each in values if way == "F" or each.reader.requires_grad]
            found[edge, way] = _message(edge, way, travelling, stages, plan, cluster, sizes, execution)
    return found


def _message(
    edge: Edge,
    way: str,
    values: Sequence[Handed],
    stages: Sequence[StageProgram],
    plan: Plan,
    cluster: Cluster,
    sizes: Sizes,
    execution: Execution,
) -> Message:
    """A rank of the receiving stage gets its part of each value; the slowest pair of ranks counts, all pairs send at once."""
    source, target = edge if way == "F" else edge[::-1]
    sources, targets, mesh = plan.ranks(source), plan.ranks(target), stages[target].program.mesh
    received, split = 0.0, 0.0
    for each in values:
        got = each.reader if way == "F" else each.maker
        size = number(sympy.Mul(each.dtype.itemsize, *got.local_shape(dict(mesh))), sizes)
        received += size
        split += size if "tp" in mesh and not isinstance(got.on("tp"), Shard) else 0.0
    unpack: tuple[Step, ...] = ()
    if execution.scatter_gather and split:
        received -= split * (1 - 1 / mesh["tp"])
        seconds = time_s("all_gather", split, group_place(cluster, mesh, ("tp",), targets[0]))
        unpack = (Step(seconds, "tp", "gather message", collective="all_gather", payload_bytes=split),)
    if not values:
        return Message(0.0)
    pairs = _pairs(sources, targets)
    sent = max(received, received * len(targets) / len(sources))
    crossing = Census(cluster).message(pairs, received * len(targets) / len(pairs))
    return Message(max(_pair_s(cluster, a, b, sent) for a, b in pairs), unpack, crossing)


def _pair_s(cluster: Cluster, source: int, target: int, bytes_: float) -> float:
    return 0.0 if source == target else time_s("send", bytes_, place(cluster, (source, target)))


def _pairs(sources: range, targets: range) -> set[tuple[int, int]]:
    """Who sends to whom: neighbours in proportion."""
    count = max(len(sources), len(targets))
    return {(sources[index * len(sources) // count], targets[index * len(targets) // count]) for index in range(count)}

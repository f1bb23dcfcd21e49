"""Stages as the simulator gets them, and what travels between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy

from hgc.backends.simulator.work import Message, Step
from hgc.cluster import Cluster
from hgc.cost.collectives import place, time_s
from hgc.cost.execution import Execution
from hgc.cost.places import group_place
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import HgcError
from hgc.ir.input_sizes import evaluate
from hgc.ir.placement import Shard
from hgc.ir.program import RECEIVED, Program
from hgc.ir.value import Size, Value, info, value
from hgc.plan import Plan
from hgc.schedule.layout import Edge

Sizes = Mapping[sympy.Symbol, float]


@dataclass(frozen=True)
class StageProgram:
    """A lowered stage and its costs; stages that do the same share one ``costs`` object, which is then looked at once."""

    program: Program
    costs: ProgramCosts


def number(expression: Size, sizes: Sizes) -> float:
    """The value of an expression; raises ``HgcError`` for a symbol that has no size."""
    missing = [symbol for symbol in expression.free_symbols if symbol not in sizes]
    if missing:
        raise HgcError(f"the size {str(missing[0])!r} is missing; give a number for each symbol of the program")
    return float(evaluate(expression, sizes))


@dataclass(frozen=True)
class Handed:
    """A value that crosses an edge, as its maker and its reader hold it."""

    maker: Value
    reader: Value


def handed(programs: Sequence[Program]) -> dict[Edge, list[Handed]]:
    """Edge -> values that travel over it."""
    makers = {
        name: (stage, node)
        for stage, program in enumerate(programs)
        for name, node in zip(program.results, program.outputs(), strict=False)
    }
    found: dict[Edge, list[Handed]] = {}
    for stage, program in enumerate(programs):
        for node in program.inputs():
            if info(node).role == RECEIVED:
                source, made = makers[str(node.target)]
                found.setdefault((source, stage), []).append(Handed(value(made), value(node)))
    return found


def messages(
    programs: Sequence[Program], plan: Plan, cluster: Cluster, sizes: Sizes, execution: Execution
) -> dict[tuple[Edge, str], Message]:
    """What travels over each edge: values forward, the gradients of those that have one back."""
    found: dict[tuple[Edge, str], Message] = {}
    for edge, values in handed(programs).items():
        for way in "FB":
            travelling = [each for each in values if way == "F" or each.reader.requires_grad]
            found[edge, way] = _message(edge, way, travelling, programs, plan, cluster, sizes, execution)
    return found


def _message(
    edge: Edge,
    way: str,
    values: Sequence[Handed],
    programs: Sequence[Program],
    plan: Plan,
    cluster: Cluster,
    sizes: Sizes,
    execution: Execution,
) -> Message:
    """A rank of the receiving stage gets its part of each value; the slowest pair of ranks counts, all pairs send at once."""
    source, target = edge if way == "F" else edge[::-1]
    sources, targets, mesh = plan.ranks(source), plan.ranks(target), programs[target].mesh
    received, split = 0.0, 0.0
    for each in values:
        got = each.reader if way == "F" else each.maker
        size = number(_local_bytes(got, mesh), sizes)
        received += size
        split += size if "tp" in mesh and not isinstance(got.on("tp"), Shard) else 0.0
    unpack: tuple[Step, ...] = ()
    if execution.scatter_gather and split:
        received -= split * (1 - 1 / mesh["tp"])
        seconds = time_s("all_gather", split, group_place(cluster, mesh, ("tp",), targets[0]))
        unpack = (Step(seconds, "tp", "gather message"),)
    sent = max(received, received * len(targets) / len(sources))
    return Message(max(_pair_s(cluster, a, b, sent) for a, b in _pairs(sources, targets)) if values else 0.0, unpack)


def _pair_s(cluster: Cluster, source: int, target: int, bytes_: float) -> float:
    return 0.0 if source == target else time_s("send", bytes_, place(cluster, (source, target)))


def _pairs(sources: range, targets: range) -> set[tuple[int, int]]:
    """Who sends to whom: neighbours in proportion."""
    count = max(len(sources), len(targets))
    return {(sources[index * len(sources) // count], targets[index * len(targets) // count]) for index in range(count)}


def _local_bytes(found: Value, mesh: Mapping[str, int]) -> Size:
    return sympy.Mul(found.dtype.itemsize, *found.local_shape(dict(mesh)))

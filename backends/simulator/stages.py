"""Stages as the simulator gets them, and what travels between them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch import fx

from hgc.backends.simulator.work import SEND, Message, Step
from hgc.cluster import Cluster
from hgc.cost.collectives import time_s
from hgc.cost.exchange import Crossing, between_nodes_bytes, exchange_s, sent_bytes
from hgc.cost.execution import Execution
from hgc.cost.places import group_place
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import HgcError
from hgc.ir.input_sizes import evaluate
from hgc.ir.placement import Shard
from hgc.ir.program import BODIES, RECEIVED, Program
from hgc.ir.value import Size, Value, info, value
from hgc.plan import Plan
from hgc.runtime.executor_exchange import Side, side
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
            found[edge, way] = _Passage(edge if way == "F" else edge[::-1], way, stages, plan, cluster, sizes, execution).of(travelling)
    return found


@dataclass(frozen=True)
class _Passage:
    """One way over an edge, from stage to stage; all pairs of ranks send at once."""

    stages: Edge
    way: str
    programs: Sequence[StageProgram]
    plan: Plan
    cluster: Cluster
    sizes: Sizes
    execution: Execution

    def of(self, values: Sequence[Handed]) -> Message:
        """Between stages on the same ranks the exchange is part of the receiver's next action."""
        if not values:
            return Message(0.0)
        unpack, split = self._unpack(values)
        sent = sent_bytes(self._crossing(each, split) for each in values)
        first_source, first_target = (self.plan.ranks(stage)[0] for stage in self.stages)
        seconds = exchange_s(self.cluster, first_source, first_target, sent)
        leaving = between_nodes_bytes(self.cluster, first_source, first_target, sent)
        if self.plan.ranks(self.stages[0]) == self.plan.ranks(self.stages[1]):
            return Message(0.0, (Step(seconds, SEND, "exchange"),) if seconds else (), leaving)
        return Message(seconds, unpack, leaving)

    def _crossing(self, each: Handed, split: int) -> Crossing:
        """``split``: into so many parts values that are whole on ``tp`` are cut, to be gathered when they have arrived."""
        source, target = map(self._side, self.stages, self._ends(each))
        bytes_ = number(sympy.Mul(each.dtype.itemsize, each.reader.numel), self.sizes)
        share = 1 / split if self._is_whole(self._ends(each)[1]) else 1.0
        return Crossing(source, target, len(each.reader.shape), bytes_ * share, self.way == "B")

    def _ends(self, each: Handed) -> tuple[Value, Value]:
        return (each.maker, each.reader) if self.way == "F" else (each.reader, each.maker)

    def _side(self, stage: int, held: Value) -> Side:
        placements = {axis: str(placement) for axis, placement in held.placements}
        return side(self.plan.ranks(stage)[0], self.programs[stage].program.mesh, placements)

    def _is_whole(self, got: Value) -> bool:
        return "tp" in self._mesh and not isinstance(got.on("tp"), Shard)

    @property
    def _mesh(self) -> dict[str, int]:
        return self.programs[self.stages[1]].program.mesh

    def _unpack(self, values: Sequence[Handed]) -> tuple[tuple[Step, ...], int]:
        """With ``scatter_gather``: what puts values together that are whole on ``tp``, and into how many parts they are cut."""
        received = [(each, self._ends(each)[1]) for each in values]
        shapes = [sympy.Mul(each.dtype.itemsize, *got.local_shape(self._mesh)) for each, got in received if self._is_whole(got)]
        bytes_ = sum(number(shape, self.sizes) for shape in shapes)
        if not self.execution.scatter_gather or not bytes_:
            return (), 1
        first = self.plan.ranks(self.stages[1])[0]
        seconds = time_s("all_gather", bytes_, group_place(self.cluster, self._mesh, ("tp",), first))
        return (Step(seconds, "tp", "gather message", collective="all_gather", payload_bytes=bytes_),), self._mesh["tp"]

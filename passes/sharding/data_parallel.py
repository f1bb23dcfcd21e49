"""Data parallelism: the batch is split, every parameter's gradient is summed once a step (by buckets, or by ZeRO's reduce-scatter)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from hgc.errors import ShardingError
from hgc.ir.placement import Replicated, Shard
from hgc.ir.program import Program
from hgc.ir.value import Value, info, value
from hgc.ir.verifier import planning_hints
from hgc.passes.base import Transform
from hgc.passes.sharding.layout import AxisLayout
from hgc.passes.sharding.lower import lower_axis
from hgc.plan import Plan


@dataclass(frozen=True)
class DataParallel(Transform):
    """Split every input with a batch dim over ``dp``; parameters are replicated and their gradients deferred to the runtime."""

    name: ClassVar[str] = "data-parallel"

    def applies(self, plan: Plan) -> bool:
        return plan.strategy.dp > 1

    def run(self, program: Program, plan: Plan) -> Program:
        return lower_axis(program, data_layout(program, "dp", plan.strategy.dp), planning_hints(program, plan.devices))


def data_layout(program: Program, axis: str, size: int) -> AxisLayout:
    """Inputs whose first dim is the batch are split along it. Raises :class:`~hgc.errors.ShardingError` if none has one."""
    inputs = {node.name: Shard(0) for node in program.inputs() if batch_first(program, node, size)}
    if not inputs:
        raise ShardingError(
            f"dp is {size}, but no input of the model has a batch dim that tracing kept symbolic or that {size} divides; "
            "name it with dynamic={'input': {0: 'b'}} or use dp=1"
        )
    divided = frozenset(symbol for node in program.inputs() if node.name in inputs for symbol in value(node).shape[0].free_symbols)
    return AxisLayout(axis, size, Replicated(), inputs, divided=divided)


def batch_first(program: Program, node: fx.Node, size: int) -> bool:
    """Is the first dim of this input the batch?"""
    found = info(node).value
    if not isinstance(found, Value) or not found.shape:
        return False
    return any(program.symbols[s].meaning == "batch" for s in found.shape[0].free_symbols if s in program.symbols)

"""Sizes of the user's data against the plan, before any transform runs."""

from __future__ import annotations

import math

from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.program import RECEIVED, Program
from hgc.ir.rules.core import named_arguments
from hgc.ir.value import info
from hgc.passes.sharding.sequence_axis import has_causal_attention, sequence_symbols
from hgc.plan import Plan
from hgc.strategy import Strategy


def check_limits(program: Program, plan: Plan) -> None:
    """Raise :class:`~hgc.errors.ShardingError` if the example's batch or sequence does not divide, or must not be divided."""
    strategy, where = plan.strategy, _where(program)
    norm = batch_statistics(program) if plan.micro_batches > 1 else ""
    if norm:
        raise ShardingError(
            f"{norm} takes statistics of the whole batch, which none of {plan.micro_batches} micro-batches has; use 1 micro-batch, or a "
            "normalisation of single rows"
        )
    for symbol, found in program.symbols.items():
        parts = strategy.dp * plan.micro_batches
        if found.meaning == "batch" and found.hint % parts:
            near = max(found.hint // parts, 1) * parts
            split = [f"dp={strategy.dp}"] if strategy.dp > 1 or plan.micro_batches == 1 else []
            split += [f"{plan.micro_batches} micro-batches"] if plan.micro_batches > 1 else []
            raise ShardingError(
                f"the batch ({symbol}){where} is {found.hint}, which {' times '.join(split)} does not divide; "
                f"use a global batch of {near} or {_other_parts(found.hint, plan)}"
            )
        rows = found.hint // plan.micro_batches
        if found.meaning == "batch" and rows < found.low:
            raise ShardingError(
                f"the batch ({symbol}){where} is {found.hint}, {rows} in each of {plan.micro_batches} micro-batches, but the model "
                f"was traced for {found.low} or more; use a larger batch or fewer micro-batches"
            )
    multiple = _sequence_multiple(program, strategy)
    for symbol in sorted(sequence_symbols(program), key=str):
        found = program.symbols[symbol]
        if found.hint % multiple:
            near = -(-found.hint // multiple) * multiple
            ranks = " and ".join(f"{axis}={size}" for axis, size in (("cp", strategy.cp), ("sp", strategy.sp)) if size > 1)
            raise ShardingError(
                f"the {found.meaning} ({symbol}){where} is {found.hint}, which {ranks} cannot split: it must be a multiple of {multiple}; "
                f"pad it to {near}, or use another size of the axis"
            )
    for symbol, found in program.symbols.items():
        share = found.hint // (strategy.cp * strategy.sp)
        if found.meaning != "batch" and strategy.tp > 1 and strategy.sequence_parallel and share % strategy.tp:
            length = f"{found.hint}" if share == found.hint else f"{found.hint}, {share} on each rank of cp and sp"
            raise ShardingError(
                f"the {found.meaning} ({symbol}){where} is {length}, which tp={strategy.tp} does not divide; pad to a multiple, "
                "or use sequence_parallel=False"
            )


def _where(program: Program) -> str:
    """The name of a stage of a pipeline, whose strategy is not the only one."""
    is_stage = program.results or any(info(node).role == RECEIVED for node in program.inputs())
    return f" of {program.name}" if is_stage else ""


def _other_parts(rows: int, plan: Plan) -> str:
    """The nearest number of micro-batches that the rows allow, or none if ``dp`` alone is too much."""
    dp = plan.strategy.dp
    if plan.micro_batches == 1 or rows % dp:
        return "another dp"
    allowed = [count for count in range(1, rows // dp + 1) if rows // dp % count == 0]
    near = min(allowed, key=lambda count: abs(count - plan.micro_batches))
    return f"{near} micro-batch{'es' * (near > 1)}"


def batch_statistics(program: Program) -> str:
    """Which block normalises by statistics of the batch, and so computes something else of each micro-batch; empty if none does."""
    for name, body in program.bodies.items():
        for node in body.graph.nodes:
            if node.op == "call_function" and node.target is ops.batch_norm and named_arguments(node)["training"]:
                return f"batch normalisation ({info(node).path or name})"
    return ""


def _sequence_multiple(program: Program, strategy: Strategy) -> int:
    """What the sequence must be a multiple of: a share for each rank, and in zigzag order two chunks for each rank of the ring."""
    chunks = 2 * strategy.cp if strategy.cp > 1 and has_causal_attention(program) else strategy.cp
    return math.lcm(chunks, strategy.cp * strategy.sp)

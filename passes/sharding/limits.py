"""Sizes of the user's data against the plan, before any transform runs."""

from __future__ import annotations

from hgc.errors import ShardingError
from hgc.ir.program import Program
from hgc.plan import Plan


def check_limits(program: Program, plan: Plan) -> None:
    """Raise :class:`~hgc.errors.ShardingError` if the example's batch or sequence does not divide."""
    strategy = plan.strategy
    for symbol, found in program.symbols.items():
        parts = strategy.dp * plan.micro_batches
        if found.meaning == "batch" and found.hint % parts:
            near = max(found.hint // parts, 1) * parts
            what = f"dp={strategy.dp}" if plan.micro_batches == 1 else f"dp={strategy.dp} times {plan.micro_batches} micro-batches"
            raise ShardingError(
                f"the batch ({symbol}) is {found.hint}, which {what} does not divide; use a global batch of {near} or another dp"
            )
        if found.meaning != "batch" and strategy.tp > 1 and strategy.sequence_parallel and found.hint % strategy.tp:
            raise ShardingError(
                f"the {found.meaning} ({symbol}) is {found.hint}, which tp={strategy.tp} does not divide; pad to a multiple, "
                "or use sequence_parallel=False"
            )

"""Which plans the emitted program can play."""

from __future__ import annotations

from hgc.errors import PlanError
from hgc.plan import Plan, Precision


def check_playable(plan: Plan) -> None:
    """Raise :class:`PlanError` for what a plan may say and emitted programs cannot do yet, with the nearest that they can."""
    if plan.stages or plan.micro_batches > 1:
        raise PlanError("emitted programs have no pipeline stages yet; leave stages out, and give micro-batches to the Trainer")
    if plan.precision != Precision():
        raise PlanError("emitted programs take their dtypes from the Trainer (dtype, compute_dtype); leave precision out of the plan")
    strategy = plan.strategy
    for axis in ("cp", "sp"):
        if getattr(strategy, axis) > 1:
            raise PlanError(f"emitted programs have no {axis} axis yet; use tp or dp for its {getattr(strategy, axis)} ranks")
    if strategy.zero in (1, 2):
        raise PlanError(f"emitted programs know zero 0 and 3, not {strategy.zero}; the nearest is 3, which needs less memory")
    if strategy.recompute != "none":
        raise PlanError(f"emitted programs do not recompute yet; drop {strategy.recompute!r}")

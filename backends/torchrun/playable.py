"""Which plans the emitted program can play."""

from __future__ import annotations

from hgc.errors import PlanError
from hgc.plan import Plan
from hgc.runtime.precision import read_precision


def check_playable(plan: Plan) -> None:
    """Raise :class:`PlanError` for what a plan may say and emitted programs cannot do yet, with the nearest that they can."""
    if plan.stages:
        raise PlanError("emitted programs have no pipeline stages yet; leave stages out, and give micro-batches to the Trainer")
    read_precision(plan.precision)
    strategy = plan.strategy
    for axis in ("cp", "sp"):
        if getattr(strategy, axis) > 1:
            raise PlanError(f"emitted programs have no {axis} axis yet; use tp or dp for its {getattr(strategy, axis)} ranks")

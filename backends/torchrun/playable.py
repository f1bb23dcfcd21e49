"""Which plans the emitted program can play."""

from __future__ import annotations

from hgc.plan import Plan
from hgc.runtime.precision import read_precision


def check_playable(plan: Plan) -> None:
    """Raise :class:`PlanError` for what a plan may say and emitted programs cannot do yet, with the nearest that they can."""
    read_precision(plan.precision)

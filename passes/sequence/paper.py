"""FlexSP's planner (arXiv:2412.01523, section 5): even micro-batches of similar lengths, each solved by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike

from hgc.errors import PlanError
from hgc.passes.sequence.blaster import even_borders
from hgc.passes.sequence.costs import Fleet, Numbers, SequenceCosts
from hgc.passes.sequence.groups import Packed, SequencePlan
from hgc.passes.sequence.micro_batch import homogeneous, solve
from hgc.passes.sequence.milp import solve_milp
from hgc.passes.sequence.planner import checked, fewest

TRIED = 5
"""Numbers of micro-batches, from the fewest on: M' of the paper."""
Solver = Callable[[Numbers, SequenceCosts, Fleet], Packed | None]


def flexsp(
    lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet, solver: str = "packing", limit_s: float = 15.0, tried: int = TRIED
) -> SequencePlan:
    """The paper's plan for a batch, the best of ``tried`` numbers of micro-batches.

    ``solver``: ``"milp"`` is the paper's programme with ``limit_s`` seconds for each micro-batch, and as in its code the best groups of one
    degree where it finds nothing better; ``"packing"`` is hgc's, which stands for a programme solved to the end. Raises ``PlanError``.
    """
    solvers: dict[str, Solver] = {"packing": _packing, "milp": lambda part, c, f: _milp(part, c, f, limit_s)}
    if solver not in solvers:
        raise PlanError(f"solver is {solver!r}; expected one of {', '.join(solvers)}")
    given = checked(lengths, costs, fleet)
    order = np.argsort(-given, kind="stable")
    best: SequencePlan | None = None
    count, done = fewest(given, costs, fleet), 0
    while done < tried and count <= len(given):
        plan = _with(given[order], order, count, costs, fleet, solvers[solver])
        if plan is not None:
            done += 1
            best = plan if best is None or plan.seconds < best.seconds else best
        count += 1
    assert best is not None, "one sequence for each micro-batch always fits"
    return best


def _with(lengths: Numbers, order: np.ndarray, count: int, costs: SequenceCosts, fleet: Fleet, solver: Solver) -> SequencePlan | None:
    borders = even_borders(lengths, count)
    assert borders is not None
    micro_batches = []
    for first, end in pairwise(borders):
        packed = solver(lengths[first:end], costs, fleet)
        if packed is None:
            return None
        micro_batches.append(packed.micro_batch(lengths[first:end], order[first:end], costs, fleet, 0.0))
    return SequencePlan(tuple(micro_batches), costs.sharding.step_s)


def _packing(lengths: Numbers, costs: SequenceCosts, fleet: Fleet) -> Packed | None:
    solved = solve(lengths, costs, fleet)
    return solved[0] if solved is not None else None


def _milp(lengths: Numbers, costs: SequenceCosts, fleet: Fleet, limit_s: float) -> Packed | None:
    found = [solve_milp(lengths, costs, fleet, limit_s), homogeneous(lengths, costs.rates(fleet.degrees), fleet)]
    return min((one for one in found if one is not None), key=lambda one: one.seconds(lengths, costs, fleet), default=None)

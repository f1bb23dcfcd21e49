"""FlexSP's planner (arXiv:2412.01523, section 5): even micro-batches of similar lengths, each solved by itself."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from hgc.errors import PlanError
from hgc.passes.sequence.blaster import even_borders
from hgc.passes.sequence.costs import Fleet, Numbers, Rates, SequenceCosts
from hgc.passes.sequence.groups import Packed, SequencePlan
from hgc.passes.sequence.micro_batch import homogeneous, solve
from hgc.passes.sequence.milp import solve_milp
from hgc.passes.sequence.planner import TRIED, best_count

Solver = Callable[[Numbers, Rates, Fleet], Packed | None]


def flexsp(
    lengths: ArrayLike, costs: SequenceCosts, fleet: Fleet, solver: str = "packing", limit_s: float = 15.0, tried: int = TRIED
) -> SequencePlan:
    """The paper's plan for a batch, the best of ``tried`` numbers of micro-batches.

    ``solver``: ``"milp"`` is the paper's programme with ``limit_s`` seconds for each micro-batch, and as in its code the best groups of one
    degree where it finds nothing better; ``"packing"`` is hgc's, which stands for a programme solved to the end. Raises ``PlanError``.
    """
    solvers: dict[str, Solver] = {"packing": _packing, "milp": lambda part, rates, fleet: _milp(part, rates, fleet, limit_s)}
    if solver not in solvers:
        raise PlanError(f"solver is {solver!r}; expected one of {', '.join(solvers)}")

    def attempt(descending: Numbers, order: NDArray[np.int_], count: int, best: SequencePlan | None) -> SequencePlan | None:
        return _with(descending, order, count, costs, fleet, solvers[solver])

    return best_count(lengths, costs, fleet, attempt, tried)


def _with(lengths: Numbers, order: NDArray[np.int_], count: int, costs: SequenceCosts, fleet: Fleet, solver: Solver) -> SequencePlan | None:
    borders = even_borders(lengths, count)
    assert borders is not None
    rates = costs.rates(fleet.degrees)
    micro_batches = []
    for first, end in pairwise(borders):
        packed = solver(lengths[first:end], rates, fleet)
        if packed is None:
            return None
        micro_batches.append(packed.micro_batch(lengths[first:end], order[first:end], rates, fleet, 0.0))
    return SequencePlan(tuple(micro_batches), costs.sharding.step_s)


def _packing(lengths: Numbers, rates: Rates, fleet: Fleet) -> Packed | None:
    solved = solve(lengths, rates, fleet)
    return solved[0] if solved is not None else None


def _milp(lengths: Numbers, rates: Rates, fleet: Fleet, limit_s: float) -> Packed | None:
    found = [solve_milp(lengths, rates, fleet, limit_s), homogeneous(lengths, rates, fleet)]
    return min((one for one in found if one is not None), key=lambda one: one.seconds(lengths, rates), default=None)

"""The outer loops: every number of stages and of micro-batches, best bounds first."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hgc.passes.sharding.search.partition import Search, cut_bound_s, walk_then_all
from hgc.passes.sharding.search.pipeline import Chooser, Pipeline, PipelinePlan, Stages, lower_bound_s, mixed, quick_bound_s


@dataclass(frozen=True, eq=False)
class Found:
    """A plan of one of the problems, by its position in the list."""

    index: int
    problem: Pipeline
    plan: PipelinePlan


@dataclass(frozen=True, eq=False)
class Outcome:
    """``found``: plans in order of time, the best first; ``lower_bound_s``: of all problems.

    ``searched`` and ``left_out`` (by their bounds) count problems, ``solved`` the stages that were planned.
    """

    found: tuple[Found, ...]
    lower_bound_s: float
    searched: int
    left_out: int
    solved: int

    @property
    def gap(self) -> float:
        best_s = self.found[0].plan.step_s
        return (best_s - self.lower_bound_s) / self.lower_bound_s if self.lower_bound_s else 0.0


def never() -> bool:
    return False


def search(
    problems: Sequence[Pipeline],
    choose: Chooser = mixed,
    cut: Search = walk_then_all,
    margin: float = 0.0,
    is_late: Callable[[], bool] = never,
    below_s: float = math.inf,
) -> Outcome:
    """Plans of problems that differ in stages and micro-batches.

    Problems are taken in the order of their quick bounds, until no bound is below the best plan (times ``1 + margin``, for those who want
    runners-up too); those that a closer bound rules out are left out too. Once ``is_late()``, the search ends with the first plan that it
    has; bounds of what it did not get to count. ``below_s``: only faster plans are wanted.
    """
    bounds = [quick_bound_s(problem) for problem in problems]
    order = sorted((index for index, bound_s in enumerate(bounds) if math.isfinite(bound_s)), key=lambda index: bounds[index])
    found: list[Found] = []
    best_s = below_s
    solved = searched = 0
    for index in order:
        if bounds[index] >= best_s * (1 + margin) or (found and is_late()):
            break
        bounds[index] = max(bounds[index], lower_bound_s(problems[index]))
        if bounds[index] >= best_s * (1 + margin):
            continue
        stages = Stages(problems[index], choose)
        plan = cut(problems[index], stages, best_s * (1 + margin))
        bounds[index] = max(bounds[index], cut_bound_s(problems[index], stages))
        searched, solved = searched + 1, solved + stages.solved
        if plan is not None:
            found.append(Found(index, problems[index], plan))
            best_s = min(best_s, plan.step_s)
    found.sort(key=lambda each: each.plan.step_s)
    bound_s = min([*bounds, *(each.plan.step_s for each in found)], default=math.inf)
    return Outcome(tuple(found), bound_s, searched, len(problems) - searched, solved)

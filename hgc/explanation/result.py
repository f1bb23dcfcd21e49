"""What an explanation holds; every number of it comes from a simulation or a search."""

from __future__ import annotations

from dataclasses import dataclass, field

from hgc.backends.simulator import Simulation
from hgc.cluster import Cluster
from hgc.passes.sharding.search.judged import Judged, Searched
from hgc.plan import Plan


@dataclass(frozen=True)
class Alternative:
    """The best plan whose ``part`` has none of the plan's ``values``; ``why_not``: there is none."""

    part: str
    values: tuple[object, ...]
    found: Judged | None
    why_not: str = ""


@dataclass(frozen=True)
class Setting:
    """The best plan for another batch, or for devices with ``memory_bytes`` each; ``why_not``: there is none."""

    batch: int
    memory_bytes: int
    found: Judged | None
    why_not: str = ""


@dataclass(frozen=True)
class Faster:
    """The plan's step if something were twice as fast."""

    what: str
    step_s: float


@dataclass(frozen=True)
class Findings:
    """What was simulated and searched around a plan.

    Args:
        plan, cluster, batch: what is explained, and rows of the global batch.
        simulation: the plan's step; ``fullness``: memory of the device nearest to its end, as a share of what it has.
        searched: the search with the plan among those that it compares; ``None`` where it found none (``why_not``).
        alternatives: one for each part of a plan. ``faster``: what the same plan would gain.
        budgets, batches: best plans elsewhere. ``seen``: every plan that was simulated for this batch, for the picture.
    """

    plan: Plan
    cluster: Cluster
    batch: int
    simulation: Simulation
    fullness: float
    searched: Searched | None
    why_not: str
    alternatives: tuple[Alternative, ...]
    faster: tuple[Faster, ...]
    budgets: tuple[Setting, ...]
    batches: tuple[Setting, ...]
    seen: tuple[Judged, ...] = field(repr=False)

    @property
    def step_s(self) -> float:
        return self.simulation.step_s

    def front(self) -> tuple[Judged, ...]:
        """Plans that were seen, by memory, each faster than all that need no more of it."""
        found: list[Judged] = []
        for each in sorted(self.seen, key=lambda judged: (judged.memory_bytes, judged.step_s)):
            if not found or each.step_s < found[-1].step_s:
                found.append(each)
        return tuple(found)

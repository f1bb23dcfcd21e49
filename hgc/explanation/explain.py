"""From a plan to its explanation: the plan simulated, and searches with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

from hgc.automatic import Judge, verdict
from hgc.cluster import Cluster, Device, Link
from hgc.errors import HgcError
from hgc.explanation.explanation import Explanation
from hgc.explanation.result import Alternative, Faster, Setting
from hgc.ir.program import Program
from hgc.passes.sharding.search.costs import ProgramBlocks
from hgc.passes.sharding.search.judged import Judged, Searched, places_of
from hgc.passes.sharding.search.planner import SearchPlanner
from hgc.passes.sharding.search.remedies import resized
from hgc.plan import Plan, Prediction

PARTS = ("pp", "dp", "zero", "tp", "sp", "cp", "recompute", "micro_batches")
"""What alternatives differ in."""
BATCHES = (0.5, 2, 4)
"""Multiples of the example's batch."""
SHRINK, MOST_BUDGETS = 0.85, 5
"""Memory budgets go down from what the fastest plan takes by this factor, at most so often."""


def explain(traced: Program, plan: Plan, cluster: Cluster, planner: SearchPlanner, judge: Judge) -> Explanation:
    """Why ``plan`` for a traced program on ``cluster``.

    ``planner``: the search to compare with, whose judge is ``judge``. Raises what :meth:`Judge.simulate` raises for the plan itself; what
    cannot be found elsewhere is told in the result.
    """
    return _Explainer(traced, plan, cluster, planner, judge).run()


@dataclass(frozen=True)
class _Explainer:
    traced: Program
    plan: Plan
    cluster: Cluster
    planner: SearchPlanner
    judge: Judge

    def run(self) -> Explanation:
        simulation = self.judge.simulate(self.traced, self.plan, self.cluster)
        own = Judged.of(self.plan, verdict(simulation, self.cluster))
        blocks = ProgramBlocks(self.traced, self.cluster, self.planner.measure, self.planner.precision, self.planner.execution)
        searched, why_not = _tried(lambda: replace(self.planner, also=(_bare(self.plan),)).search(blocks))
        quick = replace(self.planner, shown=1, refined=0)
        alternatives = tuple(self._alternatives(quick, blocks))
        fastest = min([own, *(searched.judged if searched else ())], key=lambda each: each.step_s)
        budgets = tuple(self._budgets(quick, blocks, fastest.memory_bytes))
        elsewhere = [found for found in (*(each.found for each in alternatives), *(each.found for each in budgets)) if found is not None]
        seen = {_bare(each.plan): each for each in (*elsewhere, *(searched.judged if searched else ()), own)}
        return Explanation(
            plan=self.plan,
            cluster=self.cluster,
            batch=blocks.batch,
            simulation=simulation,
            fullness=own.fullness,
            searched=searched,
            why_not=why_not,
            alternatives=alternatives,
            faster=tuple(self._faster()),
            budgets=budgets,
            batches=tuple(self._batches(quick, blocks)),
            seen=tuple(seen.values()),
        )

    def _alternatives(self, quick: SearchPlanner, blocks: ProgramBlocks) -> Iterator[Alternative]:
        for part in PARTS:
            values = values_of(self.plan, part)
            pins = quick.pins.also(forbid={part: list(values)})
            searched, why_not = _tried(lambda pins=pins: replace(quick, fix=pins.fix, forbid=pins.forbid).search(blocks))  # type: ignore[misc]
            yield Alternative(part, values, searched.best if searched else None, why_not)

    def _faster(self) -> Iterator[Faster]:
        for what, cluster in (("devices", _with_devices(self.cluster, 2.0)), ("links", _with_links(self.cluster, 2.0))):
            yield Faster(what, self.judge.simulate(self.traced, self.plan, cluster).step_s)

    def _budgets(self, quick: SearchPlanner, blocks: ProgramBlocks, needed_bytes: int) -> Iterator[Setting]:
        """Twice the memory there is, and less than the fastest plan takes, until nothing fits."""
        least = self.cluster.least_memory_bytes
        amounts = [2 * least, *(int(needed_bytes * SHRINK**count) for count in range(1, MOST_BUDGETS + 1))]
        for amount in amounts:
            other = _with_memory(self.cluster, amount)
            searched, why_not = _tried(lambda other=other: quick.search(blocks.elsewhere(cluster=other)))  # type: ignore[misc]
            yield Setting(blocks.batch, amount, _seen_here(searched, self.cluster), why_not)
            if searched is None and amount < least:
                break

    def _batches(self, quick: SearchPlanner, blocks: ProgramBlocks) -> Iterator[Setting]:
        for factor in BATCHES:
            other = resized(self.traced, factor)
            if other is not None:
                searched, why_not = _tried(lambda other=other: quick.search(blocks.elsewhere(program=other)))  # type: ignore[misc]
                yield Setting(int(blocks.batch * factor), self.cluster.least_memory_bytes, searched.best if searched else None, why_not)


def values_of(plan: Plan, part: str) -> tuple[object, ...]:
    """What a plan has there; of parts of strategies the values of all stages."""
    if part == "pp":
        return (places_of(plan),)
    if part == "micro_batches":
        return (plan.micro_batches,)
    return tuple(dict.fromkeys(getattr(strategy, part) for strategy in plan.strategies))


def _bare(plan: Plan) -> Plan:
    """Its decisions alone."""
    return replace(plan, predicted=Prediction(), notes=(), program_hash="")


def _tried(search: Callable[[], Searched]) -> tuple[Searched | None, str]:
    try:
        return search(), ""
    except HgcError as error:
        return None, str(error)


def _seen_here(searched: Searched | None, cluster: Cluster) -> Judged | None:
    """The best plan with its memory as a share of what ``cluster`` has."""
    if searched is None:
        return None
    return replace(searched.best, fullness=searched.best.memory_bytes / cluster.least_memory_bytes)


# -- clusters with one thing changed ----------------------------------------------------------------------------------------------------


def _with_memory(cluster: Cluster, memory_bytes: int) -> Cluster:
    return _each_device(cluster, lambda device: replace(device, memory_bytes=memory_bytes))


def _with_devices(cluster: Cluster, factor: float) -> Cluster:
    """Arithmetic, memory and launches so many times as fast."""

    def faster(device: Device) -> Device:
        rates = {field.name: getattr(device, field.name) for field in fields(Device) if field.name.endswith("_per_s")}
        made = replace(device, **{name: rate * factor for name, rate in rates.items() if rate is not None})
        kernels = device.kernels
        quick = replace(
            kernels,
            launch_s=kernels.launch_s / factor,
            tile_s=kernels.tile_s / factor,
            score_s=kernels.score_s / factor,
            cache_bytes_per_s=kernels.cache_bytes_per_s * factor,
        )
        return replace(made, kernels=quick)

    return _each_device(cluster, faster)


def _with_links(cluster: Cluster, factor: float) -> Cluster:
    """Bandwidth and latency of all links so many times as good."""

    def faster(link: Link) -> Link:
        switch = link.switch_bytes_per_s * factor if link.switch_bytes_per_s is not None else None
        return replace(
            link,
            bytes_per_s=link.bytes_per_s * factor,
            latency_s=link.latency_s / factor,
            base_s=link.base_s / factor,
            ramp_s=link.ramp_s / factor,
            switch_bytes_per_s=switch,
        )

    nodes = tuple(replace(node, link=faster(node.link)) for node in cluster.nodes)
    return replace(cluster, nodes=nodes, link=faster(cluster.link) if cluster.link else None)


def _each_device(cluster: Cluster, change: Callable[[Device], Device]) -> Cluster:
    return replace(cluster, nodes=tuple(replace(node, device=change(node.device)) for node in cluster.nodes))

"""Who runs what, and who hands what to whom."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from hgc import records
from hgc.errors import PlanError

Edge = tuple[int, int]


def chain(stages: int) -> tuple[Edge, ...]:
    """The edges of stages that each read the one before."""
    return tuple((stage, stage + 1) for stage in range(stages - 1))


@dataclass(frozen=True)
class Layout:
    """Ranks of each stage, edges from a stage to one that reads its results, and the number of micro-batches.

    Stages are numbered so that every edge leads to a higher number. Raises :class:`PlanError` for what no pipeline can have.
    """

    ranks: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]
    micro_batches: int

    def __post_init__(self) -> None:
        records.check_whole("micro_batches", self.micro_batches, 1, PlanError)
        if not self.ranks:
            raise PlanError("the pipeline has no stages; give at least one, with its ranks")
        for stage, ranks in enumerate(self.ranks):
            for rank in ranks:
                records.check_whole(f"a rank of stage {stage}", rank, 0, PlanError)
            if not ranks or len(set(ranks)) != len(ranks):
                raise PlanError(f"stage {stage} is on ranks {list(ranks)}; expected one or more, each once")
        used = {rank for ranks in self.ranks for rank in ranks}
        idle = sorted(set(range(max(used))) - used)
        if idle:
            raise PlanError(f"rank {idle[0]} has no stage, rank {max(used)} has one; number the ranks without gaps")
        for source, target in self.edges:
            if not 0 <= source < target < len(self.ranks):
                raise PlanError(
                    f"the edge {source} -> {target} does not lead to a later one of {len(self.ranks)} stages; number stages in their order"
                )
        if len(set(self.edges)) != len(self.edges):
            raise PlanError(f"the edges {list(self.edges)} name one twice; give each once")

    @property
    def stages(self) -> range:
        return range(len(self.ranks))

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """For each stage: the stages that it reads."""
        return tuple(tuple(sorted(a for a, b in self.edges if b == stage)) for stage in self.stages)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """For each stage: the stages that read it."""
        return tuple(tuple(sorted(b for a, b in self.edges if a == stage)) for stage in self.stages)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """For each stage: how many stages are on the longest way from it to an end, itself included."""
        found = [1] * len(self.ranks)
        for stage in reversed(self.stages):
            found[stage] += max((found[later] for later in self.after[stage]), default=0)
        return tuple(found)

    def is_remote(self, edge: Edge) -> bool:
        """Does the value of an edge travel, or is it on its ranks already?"""
        return set(self.ranks[edge[0]]) != set(self.ranks[edge[1]])

    def remote(self, stage: int, stages: Iterable[int]) -> list[int]:
        """Those of ``stages``, neighbours of ``stage``, that are on other ranks."""
        return [other for other in stages if self.is_remote((stage, other))]

    @cached_property
    def places(self) -> tuple[tuple[int, ...], ...]:
        """Ranks that host the same stages, which therefore do the same in every order, sorted by their first stage."""
        hosted: dict[int, list[int]] = {}
        for stage, ranks in enumerate(self.ranks):
            for rank in ranks:
                hosted.setdefault(rank, []).append(stage)
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in sorted(hosted):
            found.setdefault(tuple(hosted[rank]), []).append(rank)
        return tuple(tuple(found[stages]) for stages in sorted(found))

    @cached_property
    def hosted(self) -> tuple[tuple[int, ...], ...]:
        """For each place: its stages."""
        return tuple(tuple(stage for stage in self.stages if place[0] in self.ranks[stage]) for place in self.places)

    @cached_property
    def places_of(self) -> tuple[tuple[int, ...], ...]:
        """For each stage: the places that run it together."""
        return tuple(tuple(place for place, stages in enumerate(self.hosted) if stage in stages) for stage in self.stages)


def layout(ranks: Sequence[Sequence[int]], micro_batches: int, edges: Iterable[Edge] | None = None) -> Layout:
    """A :class:`Layout` of any sequences; without ``edges`` each stage reads the one before."""
    return Layout(
        tuple(tuple(stage) for stage in ranks), chain(len(ranks)) if edges is None else tuple((a, b) for a, b in edges), micro_batches
    )

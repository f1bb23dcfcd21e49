"""What a pipelined program says about itself: its stages, where each runs, and what passes between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch

from hgc.errors import PlanError
from hgc.ir.placement import Partial, Replicated, parse_placement
from hgc.runtime.plan_info import PlanInfo
from hgc.schedule import Schedule

Placements = Mapping[str, str]
"""Mesh axis -> placement as text; an axis that is not named holds the value whole, ``I``."""


@dataclass(frozen=True)
class Passed:
    """A value that one stage hands on and others receive, for one micro-batch: global shape in the program's symbols, dtype, and
    whether a gradient comes back."""

    shape: tuple[int | str, ...]
    dtype: torch.dtype
    gradient: bool = True


@dataclass(frozen=True)
class Stage:
    """One stage on ``prod(mesh)`` ranks from ``first_rank`` on.

    ``inputs``: the batch's tensors that it reads. ``receives``: parameter of ``forward`` -> name of the value and where it lives here.
    ``results``: what ``forward`` returns, in order, by name; none for the stage that returns the loss. ``zero``, ``data_axes``: as in
    :class:`~hgc.runtime.PlanInfo`. Raises ``PlanError`` for placements that cannot cross stages.
    """

    first_rank: int
    mesh: Mapping[str, int]
    inputs: Mapping[str, Placements] = field(default_factory=dict)
    receives: Mapping[str, tuple[str, Placements]] = field(default_factory=dict)
    results: Mapping[str, Placements] = field(default_factory=dict)
    zero: int = 0
    data_axes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, placements in (*self.receives.values(), *self.results.items()):
            for axis, text in placements.items():
                found = parse_placement(text)
                if axis not in self.mesh:
                    raise PlanError(f"value {name!r} names axis {axis!r}, but its stage has {list(self.mesh)}; correct the program")
                if found == Partial() or (found == Replicated() and name not in self.results):
                    raise PlanError(
                        f"value {name!r} is {text} on axis {axis!r}; between stages it must be S(d) or I, where it is made also R"
                    )

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + math.prod(self.mesh.values()))


@dataclass(frozen=True)
class Edge:
    """A value on its way from the stage that makes it to one that reads it."""

    value: str
    maker: int
    reader: int


@dataclass(frozen=True)
class PipelineInfo(PlanInfo):
    """The plan of a pipelined program: ``mesh`` is one axis, ``ranks``, over all processes; each stage has its own.

    ``values`` are what passes between ``stages``. ``schedule``: what each rank does in a step, as text. Raises ``PlanError`` for one that
    contradicts itself; whether the schedule runs to its end is proven by ``Trainer`` before the first step.
    """

    values: Mapping[str, Passed] = field(default_factory=dict)
    stages: tuple[Stage, ...] = ()
    schedule: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        makers = self.makers
        for index, stage in enumerate(self.stages):
            for name, _ in stage.receives.values():
                if makers.get(name, index) >= index:
                    raise PlanError(f"stage {index} receives {name!r}, which no stage before it hands on; correct the program")
            unknown = [name for name in (*stage.results, *(n for n, _ in stage.receives.values())) if name not in self.values]
            unknown += [name for name in stage.inputs if name not in self.inputs]
            if unknown:
                raise PlanError(f"stage {index} names {unknown[0]!r}, which the plan does not describe; correct the program")

    @cached_property
    def makers(self) -> dict[str, int]:
        """Value -> stage that makes it."""
        return {name: index for index, stage in enumerate(self.stages) for name in stage.results}

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """In order of reader, then of its parameters."""
        return tuple(
            Edge(name, self.makers[name], reader) for reader, stage in enumerate(self.stages) for name, _ in stage.receives.values()
        )

    @cached_property
    def actions(self) -> Schedule:
        return Schedule.parse(self.schedule)

    def stage_plan(self, index: int) -> PlanInfo:
        """The plan of one stage as of a program of its own, with the batch's tensors that it reads; what is assumed of sizes is the
        whole pipeline's to check."""
        stage = self.stages[index]
        inputs = {name: replace(self.inputs[name], placements=placements) for name, placements in stage.inputs.items()}
        common = {f.name: getattr(self, f.name) for f in fields(PlanInfo)}
        return PlanInfo(
            **{**common, "mesh": stage.mesh, "inputs": inputs, "zero": stage.zero, "data_axes": stage.data_axes, "assumptions": ()}
        )

"""Models and plans of published rows as lowered stages with their costs, each distinct one traced, lowered and measured once.

Rows differ in data parallelism and depth far more often than in anything else, so two things are shared. Stages with the same blocks
are lowered once, however long the pipeline is. And a program lowered for two data-parallel ranks is that for any number of them but for
the size of the axis: ``dp`` divides the batch and nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch

from hgc.backends.simulator.stages import StageProgram, received
from hgc.compiler import default_pipeline
from hgc.cost.symbolic import Communication, ProgramCosts
from hgc.ir.program import Program
from hgc.ir.verifier import verify
from hgc.passes.analysis.costs import BlockCosts
from hgc.passes.sharding.stages import cut
from hgc.plan import Plan, Stage
from hgc.strategy import Strategy
from hgc.tools.bench.fidelity_models import Architecture, build, example
from hgc.tools.bench.fidelity_plans import blocks_around
from hgc.tracing import trace

FEW = 2
"""Data-parallel ranks that programs are lowered for."""


@dataclass(frozen=True)
class Piece:
    """A kind of pipeline stage: so many layers, with the embedding in front, with the loss behind."""

    layers: int
    first: bool
    last: bool


@dataclass(frozen=True)
class _Key:
    architecture: Architecture
    dtype: str
    strategy: Strategy
    pieces: tuple[Piece, ...]


@dataclass
class Programs:
    """Keeps what it has made."""

    _traced: dict[tuple[Architecture, str], Program] = field(default_factory=dict)
    _lowered: dict[_Key, tuple[StageProgram, ...]] = field(default_factory=dict)

    def stages(self, found: Architecture, plan: Plan, layers: tuple[int, ...]) -> tuple[StageProgram, ...]:
        """The plan's stages, of which stage ``i`` has ``layers[i]``; one whole program if there is one stage only.

        Raises ``HgcError`` if the plan does not fit the model.
        """
        count = len(layers)
        kinds = [Piece(number, index == 0, index == count - 1) for index, number in enumerate(layers)]
        distinct = tuple(sorted(dict.fromkeys(kinds), key=lambda piece: (not piece.first, piece.last)))
        strategy = plan.strategy
        key = _Key(
            replace(found, layers=sum(piece.layers for piece in distinct)),
            plan.precision.compute,
            replace(strategy, dp=min(strategy.dp, FEW), zero=0, recompute="none"),
            distinct,
        )
        if key not in self._lowered:
            self._lowered[key] = self._lower(key)
        wide = dict(zip(distinct, (widened(each, "dp", strategy.dp) for each in self._lowered[key]), strict=True))
        return tuple(_linked(wide[kind], stage) for stage, kind in enumerate(kinds)) if count > 1 else (wide[kinds[0]],)

    def _trace(self, found: Architecture, dtype: str) -> Program:
        if (found, dtype) not in self._traced:
            model = build(found, getattr(torch, dtype))
            self._traced[found, dtype] = trace(model, example(8, found.positions), name="Decoder")
        return self._traced[found, dtype]

    def _lower(self, key: _Key) -> tuple[StageProgram, ...]:
        traced = self._trace(key.architecture, key.dtype)
        before, behind = blocks_around([block.path for block in traced.blocks()])
        blocks = [piece.layers + before * piece.first + behind * piece.last for piece in key.pieces]
        stages = tuple(Stage(number, index * key.strategy.devices) for index, number in enumerate(blocks))
        pieces = cut(traced, Plan(key.strategy, stages)) if len(stages) > 1 else (traced.copy(),)
        return tuple(lowered(piece, Plan(key.strategy)) for piece in pieces)


def lowered(piece: Program, plan: Plan) -> StageProgram:
    """What is recomputed follows from the strategy when times are taken, so that ``plan`` recomputes nothing."""
    piece.reference = piece.copy()
    program = default_pipeline().apply(piece, plan, lambda made, _: verify(made))
    return StageProgram(program, BlockCosts().run(program))


def widened(stage: StageProgram, axis: str, size: int) -> StageProgram:
    """The same with another size of a data axis, which divides the batch and nothing else."""
    program, costs = stage.program, stage.costs
    if program.mesh.get(axis, 1) in (1, size):
        return stage
    factor = sympy.Rational(program.mesh[axis], size)
    scaled = {symbol: symbol * factor for symbol, found in program.symbols.items() if found.meaning == "batch"}
    changed = _scaled(costs, scaled, axis, size)
    assert isinstance(changed, ProgramCosts)
    return replace(stage, program=replace(program, mesh={**program.mesh, axis: size}), costs=changed)


def _scaled(value: Any, scaled: Mapping[sympy.Symbol, Any], axis: str, size: int) -> Any:
    """A dataclass of expressions with symbols replaced, in all depths."""
    if isinstance(value, sympy.Basic):
        return value.xreplace(dict(scaled)) if value.free_symbols & scaled.keys() else value
    if isinstance(value, tuple):
        return tuple(_scaled(each, scaled, axis, size) for each in value) if value and not isinstance(value[0], sympy.Symbol) else value
    if isinstance(value, Mapping):
        return {name: _scaled(each, scaled, axis, size) for name, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if isinstance(value, Communication) and value.axis == axis:
            value = replace(value, ranks=size)
        changes = {each.name: _scaled(getattr(value, each.name), scaled, axis, size) for each in dataclasses.fields(value) if each.init}
        return replace(value, **changes)
    return value


def _linked(stage: StageProgram, number: int) -> StageProgram:
    """A stage as the ``number``-th of a pipeline: it receives what the one before hands on."""
    arriving = tuple(_crossing(number - 1, index) for index in range(len(received(stage.program))))
    return replace(stage, received=arriving, results=tuple(_crossing(number, index) for index in range(len(stage.program.results))))


def _crossing(stage: int, index: int) -> str:
    return f"result {index} of stage {stage}"

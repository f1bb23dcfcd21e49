"""Dropout with the masks of one device, whatever the plan: an option, because drawing them so is slower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import sympy
from torch import fx

from hgc.ir import ops
from hgc.ir.placement import Shard, zigzag_runs
from hgc.ir.program import Program
from hgc.ir.rules import named_arguments
from hgc.ir.sizes import SizeBuilder
from hgc.ir.value import value
from hgc.passes.base import Transform
from hgc.plan import Plan

_DROPPED = {ops.dropout: "x", ops.attention: "q"}
"""Operators that drop, and the operand whose cut their masks follow."""


@dataclass(frozen=True)
class OneDeviceDropout(Transform):
    """Tell every dropout how its tensor is cut, so that an element's fate follows from its global place (:mod:`hgc.ir.ops.keyed`).

    Runs after all axes: ``hgc.compile(..., pipeline=default_pipeline().append(OneDeviceDropout()))``. The same program on one device,
    with this transform too, draws the same masks for the same seed and number of micro-batches; but not stages of a pipeline, nor
    several micro-batches along ``dp``, which hold other rows than on one device.
    """

    name: ClassVar[str] = "one-device-dropout"

    def run(self, program: Program, plan: Plan) -> Program:
        for body in program.bodies.values():
            sizes = SizeBuilder(body.graph, program.mesh)
            for node in list(body.graph.nodes):
                if node.target in _DROPPED and (node.target is ops.dropout or named_arguments(node)["dropout"]):
                    source = named_arguments(node)[_DROPPED[node.target]]
                    node.update_kwarg("where", _cuts(source, program.mesh, sizes))
            body.recompile()
        return program


def _cuts(source: fx.Node, mesh: Mapping[str, int], sizes: SizeBuilder) -> tuple[Any, ...]:
    """How a tensor is cut, in the words of :data:`hgc.ir.ops.keyed.Cut`."""
    found = []
    for axis, placement in value(source).placements:
        if isinstance(placement, Shard):
            runs = zigzag_runs(placement.parts)
            parts = placement.parts if runs is None else runs
            found.append((axis, placement.dim, sizes.emit(parts) if isinstance(parts, sympy.Expr) else parts, runs is not None))
    return tuple(found)

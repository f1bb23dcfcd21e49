"""Traffic of parameters and gradients in numbers: units that ZeRO gathers as one, and buckets that are summed as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from hgc.cost.execution import Execution
from hgc.cost.shares import Shares
from hgc.ir.program import STATE, Program
from hgc.plan import Precision
from hgc.strategy import Strategy

ROOT = 0
"""The unit of everything that is in no repeated block."""


@dataclass(frozen=True)
class Unit:
    """Parameters that are gathered together: bytes of the whole (on a tensor-parallel rank), and of their gradients.

    ``tensors``: how many they are; ``ranks``: among which they are shared out.
    """

    gathered_bytes: float
    summed_bytes: float
    tensors: int = 1
    ranks: int = 1


@dataclass(frozen=True)
class Bucket:
    """Gradients that are summed together over ``axes``, once the backward of ``block`` (its position) is through."""

    axes: tuple[str, ...]
    block: int
    bytes: float


class Traffic:
    """What moves of a lowered program's state. ``units`` is empty without ZeRO; ``unit_of[position]`` is the unit of a block."""

    def __init__(self, program: Program, strategy: Strategy, precision: Precision, execution: Execution) -> None:
        self.program, self.strategy, self.precision, self.execution = program, strategy, precision, execution
        self.shares = Shares(program, strategy, precision, execution)

    @cached_property
    def unit_of(self) -> tuple[int, ...]:
        numbers = {unit.name: number for number, unit in enumerate(self.shares.units)}
        return tuple(numbers.get(block.path, ROOT) for block in self.program.blocks())

    @cached_property
    def units(self) -> Mapping[int, Unit]:
        shares = self.shares
        return {
            number: Unit(float(shares.gathered_bytes(unit)), float(shares.summed_bytes(unit)), len(unit.entries), shares.ranks)
            for number, unit in enumerate(shares.units)
        }

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """In the order in which they start. What no block reads has no gradient to wait for."""
        first = self._first_uses()
        return tuple(
            Bucket(axes, min(first.get(entry.name, len(self.unit_of)) for entry in entries), float(self.shares.bucket_bytes(entries)))
            for axes, entries in self.shares.buckets()
        )

    def _first_uses(self) -> dict[str, int]:
        """Name of a state -> position of the first block that reads it, whose backward comes last."""
        found: dict[str, int] = {}
        for position, block in enumerate(self.program.blocks()):
            for node in block.node.all_input_nodes:
                if node.op == "get_attr":
                    found.setdefault(str(node.target).removeprefix(STATE), position)
        return found

"""Values between the blocks of a program: who makes them, and who reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hgc.ir.program import RECEIVED, Program
from hgc.ir.value import Size, info, value


@dataclass(frozen=True)
class Crossing:
    """A value that block ``maker`` makes and ``readers`` (ascending) read; what comes from the batch alone is none, as nobody sends it.

    ``nbytes``: of the whole value. ``has_gradient``: something of its size comes back in backward.
    """

    maker: int
    readers: tuple[int, ...]
    nbytes: Size
    has_gradient: bool


def crossings(blocks: Sequence[Program]) -> tuple[Crossing, ...]:
    """Of a program cut into its blocks (:func:`hgc.passes.sharding.stages.cut`), in the order in which they are made."""
    received = [{str(node.target) for node in block.inputs() if info(node).role == RECEIVED} for block in blocks]
    found: list[Crossing] = []
    for maker, block in enumerate(blocks):
        for name, result in zip(block.results, block.outputs(), strict=bool(block.results)):
            readers = tuple(reader for reader in range(maker + 1, len(blocks)) if name in received[reader])
            if readers:
                known = value(result)
                found.append(Crossing(maker, readers, known.nbytes, known.requires_grad))
    return tuple(found)

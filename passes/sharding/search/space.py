"""The strategies that a search chooses from: Galvatron-BMW's decision trees, and hgc's own wider space."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hgc import records
from hgc.errors import PlanError
from hgc.strategy import RECOMPUTE, ZERO_STAGES, Strategy

SPACES = ("hgc", "galvatron-bmw")
PARADIGMS = ("dp", "sdp", "tp")
"""Of Galvatron-BMW: data parallel, sharded data parallel (ZeRO 3), tensor parallel."""


@dataclass(frozen=True)
class Tree:
    """A path of a decision tree of Galvatron-BMW: how one layer runs on the ``devices / stages`` devices of a pipeline stage.

    ``levels``: paradigm and degree, major first, each paradigm once: the ranks of the last level are neighbours.
    """

    stages: int
    levels: tuple[tuple[str, int], ...]
    recompute: bool = False

    def degree(self, paradigm: str) -> int:
        return dict(self.levels).get(paradigm, 1)

    @property
    def data(self) -> int:
        """Ranks that share the batch."""
        return self.degree("dp") * self.degree("sdp")

    @property
    def is_tp_consecutive(self) -> bool:
        """Are the ranks of a tensor-parallel group neighbours?"""
        return self.degree("tp") == 1 or self.levels[-1][0] == "tp"

    def strategy(self) -> Strategy | None:
        """The same in hgc's words; ``None`` for what its mesh cannot say: strided tensor parallelism, or both kinds of data parallelism."""
        if not self.is_tp_consecutive or min(self.degree("dp"), self.degree("sdp")) > 1:
            return None
        zero = 3 if self.degree("sdp") > 1 else 0
        return Strategy(dp=self.data, tp=self.degree("tp"), zero=zero, recompute="full" if self.recompute else "none")

    def __str__(self) -> str:
        words = [f"{paradigm}{degree}" for paradigm, degree in self.levels] or ["dp1"]
        return " ".join([f"pp{self.stages}", *words, *(["recompute"] if self.recompute else [])])


def trees(devices: int, *, recompute: bool = True, mixed_data: bool = False) -> tuple[Tree, ...]:
    """All trees of Galvatron-BMW on a power of two of devices, of every pipeline degree.

    ``recompute`` has each tree with and without it. ``mixed_data`` keeps those with both DP and SDP, which the paper prunes because SDP
    over both is never worse. On 8 devices: 22 trees, 44 with recomputation; 34 and 68 unpruned. Raises :class:`PlanError` for a number
    of devices that is no power of two.
    """
    records.check_whole("devices", devices, 1, PlanError)
    if devices & (devices - 1):
        near = 1 << (devices.bit_length() - 1)
        raise PlanError(f'the space "galvatron-bmw" needs a power of two of devices, not {devices}; use {near}, or the space "hgc"')
    degrees = [1 << power for power in range(devices.bit_length())]
    return tuple(
        Tree(stages, levels, again)
        for stages in degrees
        for levels in _levels(devices // stages, mixed_data)
        for again in ((False, True) if recompute else (False,))
    )


def _levels(group: int, mixed_data: bool) -> Iterator[tuple[tuple[str, int], ...]]:
    power = group.bit_length() - 1
    if not power:
        yield ()
    for count in range(1, min(power, len(PARADIGMS)) + 1):
        for paradigms in itertools.permutations(PARADIGMS, count):
            if not mixed_data and {"dp", "sdp"} <= set(paradigms):
                continue
            for powers in _compositions(power, count):
                yield tuple((paradigm, 1 << exponent) for paradigm, exponent in zip(paradigms, powers, strict=True))


def _compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Ordered sums of ``parts`` positive numbers."""
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _compositions(total - first, parts - 1):
            yield (first, *rest)


def strategies(devices: int, most_tp: int | None = None) -> tuple[Strategy, ...]:
    """hgc's own space for one stage: every ``dp`` x ``cp`` x ``sp`` x ``tp`` whose product is ``devices``, whatever they divide.

    Each with ZeRO 0 to 3 (where several ranks share data), Megatron-LM's sequence parallelism or not (where ``tp`` > 1), and the three
    kinds of recomputation. ``most_tp``: no larger ``tp`` (such as the ranks of a node).
    """
    records.check_whole("devices", devices, 1, PlanError)
    found = []
    for tp in (size for size in _divisors(devices) if most_tp is None or size <= most_tp):
        for cp in _divisors(devices // tp):
            for sp in _divisors(devices // tp // cp):
                dp = devices // (tp * cp * sp)
                zeros = tuple(ZERO_STAGES) if dp * cp * sp > 1 else (0,)
                switches = (True, False) if tp > 1 else (True,)
                found += [
                    Strategy(dp=dp, tp=tp, zero=zero, sequence_parallel=switch, cp=cp, sp=sp, recompute=recompute)
                    for zero, switch, recompute in itertools.product(zeros, switches, RECOMPUTE)
                ]
    return tuple(found)


def galvatron_strategies(devices: int) -> tuple[Strategy, ...]:
    """The trees of one stage of ``devices`` ranks that hgc's mesh can say, in hgc's words."""
    found = (tree.strategy() for tree in trees(devices) if tree.stages == 1)
    return tuple(dict.fromkeys(strategy for strategy in found if strategy is not None))


def space(name: str, devices: int, most_tp: int | None = None) -> tuple[Strategy, ...]:
    """The strategies of one stage by the name of the space. Raises :class:`PlanError` for an unknown name."""
    if name not in SPACES:
        raise PlanError(f"the space {name!r} is not known; {records.suggestion(str(name), SPACES)}")
    return strategies(devices, most_tp) if name == "hgc" else galvatron_strategies(devices)


def lowered_alike(strategy: Strategy) -> Strategy:
    """What of a strategy decides the graph: ZeRO and recomputation are the runtime's."""
    return replace(strategy, zero=0, recompute="none")


def block_graph(strategy: Strategy) -> Strategy:
    """What decides the graph of a block's share of the batch: ``dp`` only divides the batch."""
    return replace(lowered_alike(strategy), dp=1)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})

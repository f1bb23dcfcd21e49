"""How one block runs: the sizes of its mesh axes and what each rank keeps."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

from hgc import records
from hgc.errors import PlanError

AXES = ("dp", "cp", "sp", "tp")
"""Mesh axes, major first: neighbouring ranks differ in the last one, where communication is heaviest."""

ZERO_STAGES = {
    0: "state replicated, gradients summed",
    1: "optimizer state sharded",
    2: "optimizer state and gradients sharded",
    3: "parameters, gradients and optimizer state sharded",
}
RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Strategy:
    """How a block runs.

    ``dp``: ranks that each take a share of the batch. ``cp``: ranks that each take a share of the sequence and pass keys and values
    around (ring attention). ``sp``: ranks that each take a share of the sequence, and in attention a share of the heads (Ulysses).
    ``tp``: ranks that each take a share of every layer (heads, hidden channels). ``zero``: what is sharded over ``dp``, ``cp`` and ``sp``
    (:data:`ZERO_STAGES`). ``sequence_parallel``: between tensor-parallel regions activations are split along the sequence (Megatron-LM's
    sequence parallelism). ``vocab_parallel``: embedding, output projection and cross entropy are split along the vocabulary.
    ``recompute``: ``"full"`` keeps a block's inputs only and runs its forward again before its backward, ``"selective"`` repeats the core
    of attention only. Raises :class:`PlanError` for values that no program could have.
    """

    dp: int = 1
    tp: int = 1
    zero: int = 0
    sequence_parallel: bool = True
    vocab_parallel: bool = True
    cp: int = 1
    sp: int = 1
    recompute: str = "none"

    def __post_init__(self) -> None:
        for axis in AXES:
            records.check_whole(axis, getattr(self, axis), 1, PlanError)
        records.check_whole("zero", self.zero, 0, PlanError)
        if self.zero not in ZERO_STAGES:
            raise PlanError(f"zero is {self.zero}; expected 0, 1, 2 or 3, and the nearest is 3 ({ZERO_STAGES[3]})")
        for switch in ("sequence_parallel", "vocab_parallel"):
            records.check_bool(switch, getattr(self, switch), PlanError)
        if self.recompute not in RECOMPUTE:
            raise PlanError(f"recompute is {self.recompute!r}; {records.suggestion(str(self.recompute), RECOMPUTE)}")

    @property
    def devices(self) -> int:
        return math.prod(getattr(self, axis) for axis in AXES)

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size, major axis first, without axes of size one."""
        return {axis: getattr(self, axis) for axis in AXES if getattr(self, axis) > 1}

    def __str__(self) -> str:
        words = [f"{axis}{size}" for axis, size in self.mesh.items()] or ["dp1"]
        words += [f"zero{self.zero}"] if self.zero else []
        words += [word for word, (name, value) in SWITCHES.items() if getattr(self, name) == value]
        return " ".join(words)

    @staticmethod
    def parse(text: str) -> Strategy:
        """Inverse of ``str(strategy)``: ``"dp2 tp2 zero3 recompute"``; words may also be joined by ``,``, ``x`` or ``×``."""
        words = [word for word in re.split(r"[\s,×]+|(?<=\d)x(?=[a-z])", text.strip()) if word and word != "x"]
        values: dict[str, Any] = {}
        for word in words:
            name, value = _parse_word(word, text)
            if name in values:
                raise PlanError(f"strategy {text!r} gives {name!r} twice; keep one")
            values[name] = value
        if not values:
            raise PlanError("the strategy is empty; write for example 'dp2 tp2' or 'dp4 zero3'")
        return Strategy(**values)


SWITCHES: dict[str, tuple[str, bool | str]] = {
    "no-sequence-parallel": ("sequence_parallel", False),
    "no-vocab-parallel": ("vocab_parallel", False),
    "recompute": ("recompute", "full"),
    "recompute-selective": ("recompute", "selective"),
}
"""Words of a strategy's text without a number -> field and value."""


def _parse_word(word: str, text: str) -> tuple[str, int | bool | str]:
    if word in SWITCHES:
        return SWITCHES[word]
    match = re.fullmatch(r"([A-Za-z_-]*[A-Za-z_])=?(-?\d+)", word)
    name = match[1] if match else word.rstrip("=0123456789.-")
    known = [*AXES, "zero"]
    if match is None and name in known:
        raise PlanError(f"{word!r} in strategy {text!r} has no size; write for example '{name}2'")
    if match is None or name not in known:
        raise PlanError(f"unknown word {word!r} in strategy {text!r}; {records.suggestion(name, [*known, *SWITCHES])}")
    return name, int(match[2])


def nearest_strategy(wanted: Strategy, devices: int) -> Strategy:
    """The strategy for exactly ``devices`` devices whose sizes are closest to the wanted ones."""

    sequence = wanted.cp * wanted.sp if devices % (wanted.cp * wanted.sp) == 0 else 1
    cp, sp = (wanted.cp, wanted.sp) if sequence > 1 else (1, 1)
    left = devices // sequence

    def distance(tp: int) -> float:
        return abs(math.log(tp / wanted.tp)) + abs(math.log(left / tp / wanted.dp))

    tp = min((size for size in range(1, left + 1) if left % size == 0), key=distance)
    dp = left // tp
    return replace(wanted, dp=dp, cp=cp, sp=sp, tp=tp, zero=wanted.zero if dp * cp * sp > 1 else 0)

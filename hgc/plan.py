"""A plan: every decision about how a program runs on a cluster, as plain data.

Planners write plans, transforms obey them, and a person can write, edit, store and compare them::

    Plan(Strategy(dp=2, tp=2))

What was decided and what was predicted from it are kept apart, so that a plan stays valid when a prediction is renewed.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hgc import records
from hgc.errors import PlanError

VERSION = 1
AXES = ("dp", "tp")
"""Mesh axes, major first: neighbouring ranks differ in the last one, where communication is heaviest."""

ZERO_STAGES = {0: "state replicated, gradients summed", 3: "parameters, gradients and optimizer state sharded"}


@dataclass(frozen=True)
class Strategy:
    """How a block runs.

    ``dp``: ranks that each take a share of the batch. ``tp``: ranks that each take a share of every layer (heads, hidden
    channels). ``zero``: 0 keeps parameters, gradients and optimizer state whole on each data-parallel rank, 3 shards all of them
    over ``dp``. ``sequence_parallel``: between tensor-parallel regions activations are split along the sequence (Megatron-LM's
    sequence parallelism). ``vocab_parallel``: embedding, output projection and cross entropy are split along the vocabulary.
    Raises :class:`PlanError` for values that no program could have.
    """

    dp: int = 1
    tp: int = 1
    zero: int = 0
    sequence_parallel: bool = True
    vocab_parallel: bool = True

    def __post_init__(self) -> None:
        for axis in AXES:
            records.check_whole(axis, getattr(self, axis), 1, PlanError)
        records.check_whole("zero", self.zero, 0, PlanError)
        if self.zero not in ZERO_STAGES:
            near = min(ZERO_STAGES, key=lambda stage: abs(stage - self.zero + 0.1))
            raise PlanError(f"zero is {self.zero}; this release knows 0 and 3, and the nearest is {near} ({ZERO_STAGES[near]})")
        for switch in ("sequence_parallel", "vocab_parallel"):
            records.check_bool(switch, getattr(self, switch), PlanError)

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
        words += ["no-sequence-parallel"] if not self.sequence_parallel else []
        words += ["no-vocab-parallel"] if not self.vocab_parallel else []
        return " ".join(words)

    @staticmethod
    def parse(text: str) -> Strategy:
        """Inverse of ``str(strategy)``: ``"dp2 tp2 zero3"``; words may also be joined by ``,``, ``x`` or ``×``."""
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


def _parse_word(word: str, text: str) -> tuple[str, int | bool]:
    switches = {"no-sequence-parallel": "sequence_parallel", "no-vocab-parallel": "vocab_parallel"}
    if word in switches:
        return switches[word], False
    match = re.fullmatch(r"([A-Za-z_-]*[A-Za-z_])=?(-?\d+)", word)
    name = match[1] if match else word.rstrip("=0123456789.-")
    known = [*AXES, "zero"]
    if match is None and name in known:
        raise PlanError(f"{word!r} in strategy {text!r} has no size; write for example '{name}2'")
    if match is None or name not in known:
        raise PlanError(f"unknown word {word!r} in strategy {text!r}; {records.suggestion(name, [*known, *switches])}")
    return name, int(match[2])


@dataclass(frozen=True)
class Prediction:
    """What a plan is expected to do on one step; every number is an estimate and none of them changes what runs.

    ``step_s``: seconds. ``memory_bytes``: the fullest device's peak. ``communication_bytes``: sent by one device.
    ``basis``: what the numbers rest on, in a few words (``"nominal costs"``, ``"measured costs"``).
    """

    step_s: float | None = None
    memory_bytes: int | None = None
    communication_bytes: int | None = None
    basis: str = ""

    def __post_init__(self) -> None:
        for name in ("step_s", "memory_bytes", "communication_bytes"):
            if getattr(self, name) is not None:
                records.check_positive(name, getattr(self, name), PlanError, zero=True)

    def __str__(self) -> str:
        parts = []
        if self.step_s is not None:
            parts.append(f"{_seconds(self.step_s)} a step")
        if self.memory_bytes is not None:
            parts.append(f"{_bytes(self.memory_bytes)} at most on a device")
        if self.communication_bytes is not None:
            parts.append(f"{_bytes(self.communication_bytes)} sent by each device")
        if not parts:
            return "nothing"
        return ", ".join(parts) + (f" ({self.basis})" if self.basis else "")


@dataclass(frozen=True)
class Plan:
    """The decisions for one program.

    ``strategy`` holds for every block. ``program_hash`` names the program it was made for (``""``: any).
    ``predicted`` and ``notes`` inform people and change nothing.
    """

    strategy: Strategy = field(default_factory=Strategy)
    program_hash: str = ""
    predicted: Prediction = field(default_factory=Prediction)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise PlanError(f"strategy is {self.strategy!r}; expected a Strategy, for example Strategy(dp=2, tp=2)")
        if not isinstance(self.program_hash, str):
            raise PlanError(f"program_hash is {self.program_hash!r}; expected text, or '' for any program")
        if not isinstance(self.predicted, Prediction):
            raise PlanError(f"predicted is {self.predicted!r}; expected a Prediction")
        if isinstance(self.notes, str) or not all(isinstance(note, str) for note in self.notes):
            raise PlanError(f"notes is {self.notes!r}; expected a tuple of sentences")

    @property
    def devices(self) -> int:
        """How many devices run it, one rank on each."""
        return self.strategy.devices

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size, major axis first, without axes of size one."""
        return self.strategy.mesh

    def validate(self, devices: int | None = None, program_hash: str = "") -> None:
        """Raise :class:`PlanError` unless the plan makes sense and fits ``devices`` ranks and the program of that hash."""
        if self.strategy.zero == 3 and self.strategy.dp == 1:
            raise PlanError("zero is 3 but dp is 1, so there is nothing to shard state over; set dp to 2 or more, or zero to 0")
        if devices is not None and devices != self.devices:
            mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items()) or "dp 1"
            raise PlanError(
                f"the plan needs {self.devices} device{'s' * (self.devices > 1)} ({mesh}), the cluster has {devices}; "
                f"the nearest strategy that fits is '{nearest_strategy(self.strategy, devices)}'"
            )
        if self.program_hash and program_hash and self.program_hash != program_hash:
            raise PlanError(
                f"the plan was made for program {self.program_hash[:12]}, this program is {program_hash[:12]}; "
                'make a new plan with plan="auto", or clear its program_hash to use it all the same'
            )

    def to_json(self) -> str:
        content = {
            "version": VERSION,
            "program_hash": self.program_hash,
            "decisions": {"strategy": records.encode(self.strategy)},
            "predicted": records.encode(self.predicted),
            "notes": list(self.notes),
        }
        return records.to_text(content)

    @staticmethod
    def from_json(text: str) -> Plan:
        """Inverse of :meth:`to_json`; raises :class:`PlanError` naming the first thing that is wrong."""
        content = records.parse_json(text, "the plan", PlanError)
        if not isinstance(content, dict):
            raise PlanError("the plan is not a JSON object; expected the keys version and decisions")
        version = content.get("version")
        if version is None:
            raise PlanError(f"the plan has no version; expected version {VERSION}, as Plan.save writes it")
        if version != VERSION or isinstance(version, bool):
            raise PlanError(f"the plan has version {version!r}, this hgc reads version {VERSION}; make the plan anew")
        records.check_keys(content, ("version", "program_hash", "decisions", "predicted", "notes"), "the plan", PlanError)
        decisions = content.get("decisions")
        if not isinstance(decisions, dict) or "strategy" not in decisions:
            raise PlanError('the plan decides nothing; expected "decisions": {"strategy": {...}}')
        records.check_keys(decisions, ("strategy",), "decisions", PlanError)
        values = {"strategy": decisions["strategy"], **{k: v for k, v in content.items() if k not in ("version", "decisions")}}
        return records.decode(Plan, values, "", PlanError)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON, whole or not at all."""
        records.write_text(path, self.to_json(), "plan file", PlanError)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read what :meth:`save` wrote; raises :class:`PlanError` naming the file and the first thing that is wrong."""
        text = records.read_text(path, "plan file", PlanError)
        try:
            return Plan.from_json(text)
        except PlanError as wrong:
            raise PlanError(f"{path}: {wrong}") from None

    def __str__(self) -> str:
        return "\n".join(f"{name:<17}{text}" for name, text in _rows(self))


def nearest_strategy(wanted: Strategy, devices: int) -> Strategy:
    """The strategy for exactly ``devices`` devices whose sizes are closest to the wanted ones."""

    def distance(tp: int) -> float:
        return abs(math.log(tp / wanted.tp)) + abs(math.log(devices / tp / wanted.dp))

    tp = min((size for size in range(1, devices + 1) if devices % size == 0), key=distance)
    dp = devices // tp
    return replace(wanted, dp=dp, tp=tp, zero=wanted.zero if dp > 1 else 0)


def _rows(plan: Plan) -> list[tuple[str, str]]:
    strategy = plan.strategy
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items()) or "one device"
    rows = [("mesh", f"{mesh} = {plan.devices} device{'s' * (plan.devices > 1)}")]
    if strategy.dp > 1:
        rows.append(("data parallel", f"{strategy.dp} ranks share the batch; zero {strategy.zero}: {ZERO_STAGES[strategy.zero]}"))
    if strategy.tp > 1:
        extras = [("sequence", strategy.sequence_parallel), ("vocabulary", strategy.vocab_parallel)]
        split = ", ".join(f"{name} {'split too' if on else 'kept whole'}" for name, on in extras)
        rows.append(("tensor parallel", f"{strategy.tp} ranks share each layer; {split}"))
    rows.append(("made for", f"program {plan.program_hash[:12]}" if plan.program_hash else "any program"))
    rows += [("predicted", str(plan.predicted))] if plan.predicted != Prediction() else []
    rows += [("note", note) for note in plan.notes]
    return rows


def _seconds(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"


def _bytes(count: float) -> str:
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.0f} B"

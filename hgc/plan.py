"""A plan: every decision about how a program runs on a cluster, as plain data.

Planners write plans, transforms obey them, and a person can write, edit, store and compare them::

    Plan(Strategy(dp=2, tp=2))

What was decided and what was predicted from it are kept apart, so that a plan stays valid when a prediction is renewed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from pathlib import Path

from hgc import records
from hgc.errors import PlanError
from hgc.strategy import ZERO_STAGES, Strategy, nearest_strategy

VERSION = 1
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv")
"""Orders in which the stages of a pipeline work on micro-batches; ``hgc.schedule`` has them as lists of actions."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of a training step, as torch spells them; ``""`` keeps the model's own.

    ``compute``: activations and products. ``parameters``: what a rank keeps between steps. ``master``: a further copy of the parameters,
    which the optimizer updates. ``gradients``: in which gradients are summed over micro-batches and ranks. ``products``: of the matrix
    products of linear layers, where narrower than ``compute`` (``"float8"``, ``"float4"``).
    """

    compute: str = ""
    parameters: str = ""
    master: str = ""
    gradients: str = ""
    products: str = ""

    def __post_init__(self) -> None:
        for name in ("compute", "parameters", "master", "gradients", "products"):
            value, known = getattr(self, name), ("float8", "float4") if name == "products" else DTYPES
            if value not in ("", *known):
                raise PlanError(f"{name} is {value!r}; expected '' (as the model) or one of {', '.join(known)}")

    def __str__(self) -> str:
        named = ((field.name, getattr(self, field.name)) for field in fields(self))
        words = [f"{name} {value}" for name, value in named if value]
        return ", ".join(words) or "as the model"


DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Stage:
    """The next ``blocks`` blocks of the program, run by ``strategy.devices`` ranks from ``first_rank`` on.

    Stages may share ranks: several stages of one rank are its virtual stages. ``strategy``: ``None`` means the plan's.
    """

    blocks: int
    first_rank: int
    strategy: Strategy | None = None

    def __post_init__(self) -> None:
        records.check_whole("blocks", self.blocks, 1, PlanError)
        records.check_whole("first_rank", self.first_rank, 0, PlanError)
        if self.strategy is not None and not isinstance(self.strategy, Strategy):
            raise PlanError(f"strategy is {self.strategy!r}; expected a Strategy, or none for the plan's")


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

    ``strategy`` holds for every block whose stage has none of its own. ``stages`` cut the program into a pipeline, which works on
    ``micro_batches`` equal parts of the batch in the order of ``schedule``; without stages the micro-batches follow one another.
    ``program_hash`` names the program it was made for (``""``: any). ``predicted`` and ``notes`` inform people and change nothing.
    """

    strategy: Strategy = field(default_factory=Strategy)
    stages: tuple[Stage, ...] = ()
    schedule: str = "1f1b"
    micro_batches: int = 1
    precision: Precision = field(default_factory=Precision)
    program_hash: str = ""
    predicted: Prediction = field(default_factory=Prediction)
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.strategy, Strategy):
            raise PlanError(f"strategy is {self.strategy!r}; expected a Strategy, for example Strategy(dp=2, tp=2)")
        if not isinstance(self.stages, tuple) or not all(isinstance(stage, Stage) for stage in self.stages):
            raise PlanError(f"stages is {self.stages!r}; expected a tuple of Stage, for example (Stage(blocks=6, first_rank=0), ...)")
        if self.schedule not in SCHEDULES:
            raise PlanError(f"schedule is {self.schedule!r}; {records.suggestion(str(self.schedule), SCHEDULES)}")
        records.check_whole("micro_batches", self.micro_batches, 1, PlanError)
        if not isinstance(self.precision, Precision):
            raise PlanError(f"precision is {self.precision!r}; expected a Precision")
        if not isinstance(self.program_hash, str):
            raise PlanError(f"program_hash is {self.program_hash!r}; expected text, or '' for any program")
        if not isinstance(self.predicted, Prediction):
            raise PlanError(f"predicted is {self.predicted!r}; expected a Prediction")
        if isinstance(self.notes, str) or not all(isinstance(note, str) for note in self.notes):
            raise PlanError(f"notes is {self.notes!r}; expected a tuple of sentences")

    @property
    def devices(self) -> int:
        """How many devices run it, one rank on each."""
        return max((rank + 1 for stage in range(len(self.stages)) for rank in self.ranks(stage)), default=self.strategy.devices)

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size of the plan's own strategy, major axis first, without axes of size one."""
        return self.strategy.mesh

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        """The strategy of each stage, or the one of a plan without stages."""
        return tuple(stage.strategy or self.strategy for stage in self.stages) or (self.strategy,)

    def ranks(self, stage: int) -> range:
        """The ranks that run a stage; of a plan without stages: all."""
        first = self.stages[stage].first_rank if self.stages else 0
        return range(first, first + self.strategies[stage].devices)

    def validate(self, devices: int | None = None, program_hash: str = "") -> None:
        """Raise :class:`PlanError` unless the plan makes sense and fits ``devices`` ranks and the program of that hash."""
        for index, strategy in enumerate(self.strategies):
            if strategy.zero and strategy.dp * strategy.cp * strategy.sp == 1:
                where = f" of stage {index}" if self.stages else ""
                raise PlanError(
                    f"zero{where} is {strategy.zero} but dp is 1, so there is nothing to shard state over; "
                    "set dp to 2 or more, or zero to 0"
                )
        idle = sorted(set(range(self.devices)) - {rank for stage in range(len(self.strategies)) for rank in self.ranks(stage)})
        if idle:
            raise PlanError(
                f"rank {idle[0]} has no stage; lower first_rank of the stages behind it, so that all of {self.devices} ranks work"
            )
        if devices is not None and devices != self.devices:
            mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items()) or "dp 1"
            what = f"{len(self.stages)} stages" if self.stages else mesh
            near = "" if self.stages else f"; the nearest strategy that fits is '{nearest_strategy(self.strategy, devices)}'"
            raise PlanError(f"the plan needs {self.devices} device{'s' * (self.devices > 1)} ({what}), the cluster has {devices}{near}")
        if self.program_hash and program_hash and self.program_hash != program_hash:
            raise PlanError(
                f"the plan was made for program {self.program_hash[:12]}, this program is {program_hash[:12]}; "
                'make a new plan with plan="auto", or clear its program_hash to use it all the same'
            )

    def to_json(self) -> str:
        content = {
            "version": VERSION,
            "program_hash": self.program_hash,
            "decisions": {name: records.encode(getattr(self, name)) for name in DECISIONS},
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
        records.check_keys(decisions, DECISIONS, "decisions", PlanError)
        values = {**decisions, **{k: v for k, v in content.items() if k not in ("version", "decisions")}}
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


DECISIONS = ("strategy", "stages", "schedule", "micro_batches", "precision")
"""Fields of :class:`Plan` that change what runs."""


def _rows(plan: Plan) -> list[tuple[str, str]]:
    rows = _strategy_rows(plan.strategy, plan.devices) if not plan.stages else []
    for index, stage in enumerate(plan.stages):
        ranks, size = plan.ranks(index), f"{stage.blocks} block{'s' * (stage.blocks > 1)}"
        rows.append((f"stage {index}", f"{size} on ranks {ranks[0]} to {ranks[-1]}: {plan.strategies[index]}"))
    rows += [("schedule", f"{plan.schedule}, {plan.micro_batches} micro-batches")] if plan.stages else []
    rows += [("micro-batches", str(plan.micro_batches))] if plan.micro_batches > 1 and not plan.stages else []
    rows += [("precision", str(plan.precision))] if plan.precision != Precision() else []
    rows.append(("made for", f"program {plan.program_hash[:12]}" if plan.program_hash else "any program"))
    rows += [("predicted", str(plan.predicted))] if plan.predicted != Prediction() else []
    rows += [("note", note) for note in plan.notes]
    return rows


def _strategy_rows(strategy: Strategy, devices: int) -> list[tuple[str, str]]:
    mesh = " x ".join(f"{axis} {size}" for axis, size in strategy.mesh.items()) or "one device"
    rows = [("mesh", f"{mesh} = {devices} device{'s' * (devices > 1)}")]
    if strategy.dp > 1:
        rows.append(("data parallel", f"{strategy.dp} ranks share the batch; zero {strategy.zero}: {ZERO_STAGES[strategy.zero]}"))
    if strategy.cp > 1:
        rows.append(("context parallel", f"{strategy.cp} ranks share the sequence; keys and values go around"))
    if strategy.sp > 1:
        rows.append(("sequence parallel", f"{strategy.sp} ranks share the sequence, and heads in attention (Ulysses)"))
    if strategy.tp > 1:
        extras = [("sequence", strategy.sequence_parallel), ("vocabulary", strategy.vocab_parallel)]
        split = ", ".join(f"{name} {'split too' if on else 'kept whole'}" for name, on in extras)
        rows.append(("tensor parallel", f"{strategy.tp} ranks share each layer; {split}"))
    return rows + ([("recompute", strategy.recompute)] if strategy.recompute != "none" else [])


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

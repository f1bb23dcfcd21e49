"""A case of ``hgc bench parity``: a model, a plan, shapes; as one line of text that repeats it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from torch import nn

from hgc import records
from hgc.errors import HgcError
from hgc.plan import Plan, Precision, Stage
from hgc.strategy import Strategy
from hgc.tools.bench import zoo
from hgc.tools.bench.parity_models import MODELS, Batch, zoo_names

ZOO = "zoo:"
PRECISIONS: dict[str, Precision] = {
    "": Precision(),
    "autocast": Precision(compute="bfloat16", parameters="float32"),
    "bfloat16": Precision("bfloat16", "bfloat16", master="float32", gradients="float32"),
    "wide gradients": Precision(parameters="float32", gradients="float64"),
    "wide master": Precision(parameters="float32", master="float64"),
}
Part = tuple[int, int, str]
"""A stage: its share of the blocks, its first rank, its strategy as text."""


@dataclass(frozen=True)
class ParityCase:
    """``model`` is one of :data:`MODELS` with ``sizes``, or ``zoo:NAME``; ``batch`` rows of ``length``.

    ``plan``: a strategy's text, of cases without ``stages``. ``frozen``: every so many parameters is not trained, 0 trains all.
    ``precision``: one of :data:`PRECISIONS`. ``dropout``: with the masks of one device. ``own_trace``: trace with the case's own batch,
    not with one that all cases of the model share.
    """

    model: str
    plan: str
    batch: int
    length: int
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    micro_batches: int = 1
    stages: tuple[Part, ...] = ()
    schedule: str = "1f1b"
    frozen: int = 0
    precision: str = ""
    dropout: bool = False
    own_trace: bool = False

    def __str__(self) -> str:
        """JSON without what is as usual."""
        usual = {f.name: f.default for f in fields(self)}
        content = {name: value for name, value in asdict(self).items() if value != usual[name] and value != {}}
        return json.dumps(content, separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> ParityCase:
        """Inverse of ``str``; raises :class:`HgcError` naming what is wrong."""
        content = records.parse_json(text, "the case", HgcError)
        try:
            case = ParityCase(**{**content, "stages": tuple((int(s), int(r), str(t)) for s, r, t in content.get("stages", ()))})
        except (TypeError, ValueError, AttributeError) as wrong:
            raise HgcError(f"the case {text[:60]!r} is none ({wrong}); give one that hgc bench parity has printed") from None
        for name, value, known in (
            ("model", case.model, [*MODELS, *(ZOO + name for name in zoo_names())]),
            ("precision", case.precision, list(PRECISIONS)),
            ("dtype", case.dtype, ["float32", "float64"]),
        ):
            if value not in known:
                raise HgcError(f"the case names the {name} {value!r}; {records.suggestion(str(value), known)}")
        return case

    @property
    def strategies(self) -> tuple[Strategy, ...]:
        return tuple(Strategy.parse(text) for *_, text in self.stages) or (Strategy.parse(self.plan),)

    @property
    def subject(self) -> ParityCase:
        """What a traced program depends on: the model, with a batch to trace it with."""
        rows, length = self.batch, self.length
        if not self.own_trace:
            rows, length = 4, max(16, zoo.find(self.model.removeprefix(ZOO)).minimum) if self.model.startswith(ZOO) else 16
        return ParityCase(self.model, "dp1", rows, length, self.sizes, frozen=self.frozen)

    def plan_for(self, blocks: int) -> Plan:
        """The plan for a program of so many blocks."""
        common: dict[str, Any] = {"micro_batches": self.micro_batches, "precision": PRECISIONS[self.precision]}
        if not self.stages:
            return Plan(Strategy.parse(self.plan), **common)
        counts = shared_out(blocks, [share for share, *_ in self.stages])
        stages = (Stage(n, first, strategy) for n, (_, first, _), strategy in zip(counts, self.stages, self.strategies, strict=True))
        return Plan(stages=tuple(stages), schedule=self.schedule, **common)

    def build(self) -> tuple[nn.Module, Callable[..., torch.Tensor] | None]:
        """The model with weights drawn from a fixed seed, and the loss of models that return none."""
        torch.manual_seed(0)
        if self.model.startswith(ZOO):
            entry = zoo.find(self.model.removeprefix(ZOO))
            model, loss = entry.build("small"), entry.loss
        else:
            model, loss = MODELS[self.model].build(self.sizes), None
        for parameter in itertools.islice(model.parameters(), 0, None, self.frozen) if self.frozen else ():
            parameter.requires_grad_(False)
        return model, loss

    def make_batch(self) -> Batch:
        """A batch from a fixed seed."""
        torch.manual_seed(1)
        if self.model.startswith(ZOO):
            return zoo.find(self.model.removeprefix(ZOO)).batch(self.batch, self.length)
        return MODELS[self.model].batch(self.sizes, self.batch, self.length)


def shared_out(blocks: int, shares: Sequence[int]) -> list[int]:
    """Blocks for each stage in the proportion of the shares, one at least, all of them if there are enough."""
    total = sum(shares)
    ends = [round(blocks * sum(shares[: index + 1]) / total) for index in range(len(shares))]
    for index in range(len(shares)):  # from the front one block at least, from the back room for those that follow
        ends[index] = max(ends[index], (ends[index - 1] if index else 0) + 1)
    for index in range(len(shares) - 1, -1, -1):
        ends[index] = max(min(ends[index], blocks - (len(shares) - 1 - index)), index + 1)
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]

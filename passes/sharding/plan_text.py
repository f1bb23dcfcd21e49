"""A plan in one line of text: ``"pp4 dp2 tp2 1f1b micro8"``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from hgc.errors import PlanError
from hgc.ir.program import Program
from hgc.passes.sharding.even_stages import even_stages
from hgc.plan import SCHEDULES, Plan
from hgc.strategy import Strategy

_NUMBERED = re.compile(r"(pp|virtual|micro)(\d+)")


@dataclass(frozen=True)
class PlanText:
    """What the words of a plan's text mean; which blocks are in which stage follows from the program.

    The words are a strategy's (:meth:`Strategy.parse`) and, in any order, ``pp4``: four places, each with the ranks of the strategy,
    that share the blocks evenly; ``virtual2``: two stages on each place; ``gpipe``, ``1f1b``, ``interleaved``, ``zb-h1`` or ``zbv``: the
    schedule, by default ``1f1b``, of virtual stages ``interleaved``; ``micro8``: micro-batches, by default as many as places.
    """

    strategy: Strategy = field(default_factory=Strategy)
    places: int = 1
    virtual: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1

    @staticmethod
    def parse(text: str) -> PlanText:
        """Raises :class:`~hgc.errors.PlanError` for words that are unknown or do not fit together."""
        words = [word for word in re.split(r"[\s,]+", text.strip()) if word]
        numbers = {match[1]: int(match[2]) for word in words if (match := _NUMBERED.fullmatch(word))}
        schedules = [word for word in words if word in SCHEDULES]
        rest = [word for word in words if word not in SCHEDULES and not _NUMBERED.fullmatch(word)]
        strategy = Strategy.parse(" ".join(rest)) if rest or not numbers else Strategy()
        _check(text, words, schedules, numbers)
        places, virtual = numbers.get("pp", 1), numbers.get("virtual", 1)
        schedule = schedules[0] if schedules else "interleaved" if virtual > 1 else "1f1b"
        return PlanText(strategy, places, 2 if schedule == "zbv" else virtual, schedule, numbers.get("micro", places))

    @property
    def devices(self) -> int:
        return self.places * self.strategy.devices

    def plan(self, program: Program) -> Plan:
        """Raises :class:`~hgc.errors.PlanError` for more stages than blocks."""
        if self.places * self.virtual == 1:
            return Plan(self.strategy, micro_batches=self.micro_batches)
        stages = even_stages(program, self.places, self.strategy, self.virtual, vee=self.schedule == "zbv")
        return Plan(self.strategy, stages=stages, schedule=self.schedule, micro_batches=self.micro_batches)


def _check(text: str, words: Sequence[str], schedules: Sequence[str], numbers: dict[str, int]) -> None:
    zero = next((name for name, number in numbers.items() if number < 1), None)
    if zero is not None:
        raise PlanError(f"{zero} is 0 in plan {text!r}; expected 1 or more")
    repeated = next((name for name in numbers if sum(word.startswith(name) for word in words) > 1), None)
    if repeated is not None or len(schedules) > 1:
        raise PlanError(f"plan {text!r} gives {repeated or 'its schedule'} twice; keep one")
    if numbers.get("pp", 1) == 1 and (schedules or "virtual" in numbers):
        raise PlanError(f"plan {text!r} has no pipeline that {schedules[0] if schedules else 'virtual'} could order; add for example pp2")

"""What a user fixes or forbids of a plan, and which of it cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hgc import records
from hgc.errors import PlanError
from hgc.strategy import AXES, RECOMPUTE, ZERO_STAGES, Strategy

Pinned = Mapping[str, object] | Sequence[tuple[str, object]]
"""Part of a plan -> its value, or a list of values: ``{"tp": 2, "zero": [0, 3]}``."""
OUTER = ("pp", "micro_batches", "schedule")
"""Parts that hold for the whole plan."""
PARTS = ("pp", *AXES, "zero", "recompute", "sequence_parallel", "micro_batches", "schedule")
"""What may be pinned: pipeline places, fields of all strategies, micro-batches, order of the pipeline."""
_CHOICES: dict[str, tuple[object, ...]] = {
    "zero": tuple(ZERO_STAGES),
    "recompute": RECOMPUTE,
    "sequence_parallel": (True, False),
    "schedule": ("gpipe", "1f1b", "interleaved", "zb-h1"),
}
_Values = tuple[tuple[str, tuple[object, ...]], ...]


@dataclass(frozen=True)
class Pins:
    """``fix``: part -> the values one of which it must have; ``forbid``: part -> those that it must not have."""

    fix: _Values = ()
    forbid: _Values = ()

    @staticmethod
    def of(fix: Pinned, forbid: Pinned) -> Pins:
        """Raises :class:`~hgc.errors.PlanError` for a part that no plan has, a value that it cannot have, and a contradiction."""
        found = Pins(_read("fix", fix), _read("forbid", forbid))
        for name, values in found.fix:
            if not any(found.allows(name, value) for value in values):
                raise PlanError(f"{name} is fixed to {_either(values)} and forbidden to be that; drop one of the two")
        return found

    def __bool__(self) -> bool:
        return bool(self.fix or self.forbid)

    def __str__(self) -> str:
        kept = [f"{name}={_either(values)}" for name, values in self.fix]
        return ", ".join([*kept, *(f"not {name}={_either(values)}" for name, values in self.forbid)])

    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for name, _ in (*self.fix, *self.forbid)))

    def allows(self, name: str, value: object) -> bool:
        wanted = [values for part, values in self.fix if part == name]
        refused = [values for part, values in self.forbid if part == name]
        return all(value in values for values in wanted) and not any(value in values for values in refused)

    def allow(self, strategy: Strategy) -> bool:
        return all(self.allows(name, getattr(strategy, name)) for name in self.names() if name not in OUTER)

    def also(self, fix: Pinned = (), forbid: Pinned = ()) -> Pins:
        """These and more."""
        more = Pins.of(fix, forbid)
        return Pins((*self.fix, *more.fix), (*self.forbid, *more.forbid))

    def without_one(self) -> Iterator[tuple[str, Pins]]:
        """Each pin in words, and all but it."""
        for index, (name, values) in enumerate(self.fix):
            yield f"{name}={_either(values)}", replace(self, fix=self.fix[:index] + self.fix[index + 1 :])
        for index, (name, values) in enumerate(self.forbid):
            yield f"not {name}={_either(values)}", replace(self, forbid=self.forbid[:index] + self.forbid[index + 1 :])

    def check(self, devices: int, blocks: int, batch: int) -> None:
        """Raise :class:`~hgc.errors.PlanError` for a size that no plan on these devices, of these blocks and this batch can have."""
        for name, values in self.fix:
            if name in ("pp", *AXES) and not any(_divides(value, devices) for value in values):
                fitting = ", ".join(str(size) for size in range(1, devices + 1) if devices % size == 0)
                raise PlanError(f"{name} is fixed to {_either(values)}, which does not divide {_count(devices)}; use one of {fitting}")
            if name == "micro_batches" and not any(_divides(value, batch) for value in values):
                raise PlanError(f"micro_batches is fixed to {_either(values)}, which does not divide the batch of {batch}; use a divisor")
            if name == "pp" and all(isinstance(value, int) and value > blocks for value in values):
                raise PlanError(f"pp is fixed to {_either(values)}, but the program has {blocks} blocks; use at most {blocks}")
        sizes = {name: values[0] for name, values in self.fix if name in ("pp", *AXES) and len(values) == 1}
        needed = math.prod(size for size in sizes.values() if isinstance(size, int))
        if devices % needed or (len(sizes) == len(AXES) + 1 and needed != devices):
            words = " x ".join(f"{name}={size}" for name, size in sizes.items())
            raise PlanError(f"fix asks for {words}, {_count(needed)}, the cluster has {devices}; drop one of them or change the cluster")


def _read(what: str, pinned: Pinned) -> _Values:
    pairs = pinned.items() if isinstance(pinned, Mapping) else pinned
    return tuple((name, tuple(_checked(what, name, value) for value in _listed(given))) for name, given in pairs)


def _listed(given: object) -> Sequence[Any]:
    return tuple(given) if isinstance(given, list | tuple | set | frozenset | range) else (given,)


def _checked(what: str, name: str, value: Any) -> Any:
    if name not in PARTS:
        raise PlanError(f"a plan has no {name!r} to {what}; {records.suggestion(str(name), PARTS)}")
    if name in _CHOICES:
        if value not in _CHOICES[name] or isinstance(value, bool) != (name == "sequence_parallel"):
            raise PlanError(f"{what} has {name}={value!r}; expected one of {', '.join(map(str, _CHOICES[name]))}")
    elif not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise PlanError(f"{what} has {name}={value!r}; expected a whole number of 1 or more")
    return value


def parse_pins(what: str, words: Sequence[str]) -> dict[str, list[object]]:
    """From a command line: ``["tp=2", "zero=0,3", "sequence_parallel=no"]``. Raises :class:`~hgc.errors.PlanError` for other words."""
    found: dict[str, list[object]] = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not text:
            raise PlanError(f"{word!r} pins nothing; write for example --{what} tp=2, or --{what} zero=0,3 for several values")
        found.setdefault(name.replace("-", "_"), []).extend(map(_value, text.split(",")))
    return found


def _value(text: str) -> object:
    if text in ("yes", "no", "true", "false"):
        return text in ("yes", "true")
    return int(text) if text.isdecimal() else text


def _divides(value: object, number: int) -> bool:
    return isinstance(value, int) and number % value == 0


def _either(values: Sequence[object]) -> str:
    return " or ".join(map(str, values))


def _count(devices: int) -> str:
    return f"{devices} device{'s' * (devices > 1)}"

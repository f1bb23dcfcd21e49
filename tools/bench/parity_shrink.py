"""Make a failing case of ``hgc bench parity`` small: whatever can be taken away while it fails in the same way is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from hgc.strategy import AXES, Strategy
from hgc.tools.bench.parity_cases import ParityCase, Part
from hgc.tools.bench.parity_check import Outcome
from hgc.tools.bench.parity_models import MODELS

TRIES = 80


def shrink(case: ParityCase, judge: Callable[[ParityCase], Outcome], tries: int = TRIES) -> tuple[ParityCase, Outcome]:
    """The smallest case that single simplifications lead to and that ends in the same kind of outcome; at most so many are judged."""
    outcome = judge(case)
    while True:
        for simpler in smaller(case):
            if tries == 0:
                return case, outcome
            tries -= 1
            found = judge(simpler)
            if found.kind == outcome.kind and _error(found) == _error(outcome):
                case, outcome = simpler, found
                break
        else:
            return case, outcome


def _error(outcome: Outcome) -> str:
    """The type of the error of a case that failed."""
    return outcome.what.partition(":")[0] if outcome.kind == "failed" else ""


def smaller(case: ParityCase) -> Iterator[ParityCase]:
    """Cases that are simpler in one respect, the greatest steps first."""
    yield from _fewer_stages(case)
    yield from _simpler_strategies(case)
    usual = {"precision": "", "dropout": False, "own_trace": False, "frozen": 0}
    for name, value in usual.items():
        if getattr(case, name) != value:
            yield replace(case, **{name: value})  # type: ignore[arg-type]  # names and types are ParityCase's
    if case.schedule != "gpipe" and case.stages:
        yield replace(case, schedule="gpipe" if case.schedule == "1f1b" else "1f1b")
    rows = math.lcm(*(strategy.dp for strategy in case.strategies))
    if case.micro_batches > 1:
        yield replace(case, micro_batches=1, batch=rows)
        yield replace(case, micro_batches=case.micro_batches - 1, batch=rows * (case.micro_batches - 1))
    if case.batch > rows * case.micro_batches:
        yield replace(case, batch=rows * case.micro_batches)
    if case.length > 4:
        yield replace(case, length=case.length // 2)
    for name, value in case.sizes.items():
        for other in MODELS[case.model].sizes[name]:
            if other < value:
                yield replace(case, sizes={**case.sizes, name: other})


def _fewer_stages(case: ParityCase) -> Iterator[ParityCase]:
    if not case.stages:
        return
    for strategy in dict.fromkeys(text for *_, text in case.stages):
        yield replace(case, stages=(), schedule="1f1b", plan=strategy)
    for index in range(len(case.stages) if len(case.stages) > 1 else 0):
        yield _packed(case, case.stages[:index] + case.stages[index + 1 :])
    if len({share for share, *_ in case.stages}) > 1:
        yield replace(case, stages=tuple((1, first, text) for _, first, text in case.stages))


def _simpler_strategies(case: ParityCase) -> Iterator[ParityCase]:
    if not case.stages:
        for simpler in _simpler(case.plan):
            yield replace(case, plan=simpler)
    for index, (share, first, text) in enumerate(case.stages):
        for simpler in _simpler(text):
            yield _packed(case, (*case.stages[:index], (share, first, simpler), *case.stages[index + 1 :]))


def _simpler(text: str) -> Iterator[str]:
    strategy = Strategy.parse(text)
    for change in ({"recompute": "none"}, {"zero": 0}, *({axis: 1} for axis in AXES)):
        simpler = replace(strategy, **change)  # type: ignore[arg-type]  # names and types are Strategy's
        if simpler != strategy and not (simpler.zero and simpler.dp * simpler.cp * simpler.sp == 1):
            yield str(simpler)


def _packed(case: ParityCase, stages: tuple[Part, ...]) -> ParityCase:
    """Ranks that no stage uses are left out."""
    used = sorted({first + offset for _, first, text in stages for offset in range(Strategy.parse(text).devices)})
    number = {rank: index for index, rank in enumerate(used)}
    return replace(case, stages=tuple((share, number[first], text) for share, first, text in stages))

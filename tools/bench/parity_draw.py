"""Random cases for ``hgc bench parity``: five in a row share a model, under plans over the whole space."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from hgc.strategy import AXES, Strategy
from hgc.tools.bench import zoo
from hgc.tools.bench.parity_cases import PRECISIONS, ZOO, ParityCase, Part
from hgc.tools.bench.parity_models import EXPERTS, MODELS, WHOLE_BATCH, zoo_names

GROUP = 5
"""Cases in a row that share a traced model."""
MOST_RANKS = 8
_UNLIKE = ((3, 1), (1, 3), (2, 1), (1, 2), (2, 2), (4, 2), (2, 4), (4, 2, 2), (2, 2, 4), (1, 2, 1), (2, 1, 2), (1, 1, 2, 1), (3, 2, 1))
"""Ranks of stages that follow one another."""
_MISFITS = 0.07
"""Share of plans and shapes drawn without regard to what fits: these must be refused, not run wrongly."""


def draw(seed: int, index: int) -> ParityCase:
    """Case number ``index`` of a seed."""
    model = _model(random.Random(f"{seed}/{index // GROUP}/model"))
    dice = random.Random(f"{seed}/{index}")
    drawn = [_planned(dice, model) for _ in range(1 if dice.random() < _MISFITS else 20)]
    case = next((each for each in drawn if _fits(each)), drawn[0])
    return _shaped(dice, _computed(dice, case))


def _model(dice: random.Random) -> ParityCase:
    """A model without a plan."""
    frozen = dice.choice((0, 0, 0, 2, 3, 5))
    if dice.random() < 0.3:
        plain = [name for name in zoo_names() if name not in EXPERTS]
        return ParityCase(ZOO + dice.choice(EXPERTS if dice.random() < 0.3 else plain), "dp1", 1, 1, frozen=frozen)
    name = dice.choice(list(MODELS))
    sizes = {size: dice.choice(values) for size, values in MODELS[name].sizes.items()}
    sizes["heads"] = dice.choice((sizes["heads"], 4, 6, 8))  # heads that plans can split are the more interesting ones
    if sizes["heads"] % sizes.get("shared", 1):
        sizes["shared"] = 1
    return ParityCase(name, "dp1", 1, 1, sizes, frozen=frozen)


# -- plans ------------------------------------------------------------------------------------------------------------------------------


def _planned(dice: random.Random, model: ParityCase) -> ParityCase:
    fields = {**vars(model)}
    kind = dice.choice(("whole", "whole", "alike", "alike", "unlike", "shared"))
    if kind == "whole":
        micro_batches = dice.choice((1, 1, 1, 2))
        return ParityCase(**{**fields, "plan": str(_strategy(dice, dice.randrange(2, MOST_RANKS + 1))), "micro_batches": micro_batches})
    micro_batches = dice.choice((1, 2, 2, 3, 4, 4))
    stages, schedule = {"alike": _alike, "unlike": _unlike, "shared": _sharing}[kind](dice)
    return ParityCase(**{**fields, "stages": stages, "schedule": schedule, "micro_batches": micro_batches})


def _alike(dice: random.Random) -> tuple[tuple[Part, ...], str]:
    """Places with equal strategies; virtual stages go around them, or there and back."""
    places = dice.choice((2, 2, 3, 4))
    schedule = dice.choice(("gpipe", "1f1b", "interleaved", "zb-h1", "zbv"))
    laps = 2 if schedule in ("interleaved", "zbv") else 1
    strategy = _strategy(dice, dice.randrange(1, MOST_RANKS // places + 1))
    there, back = list(range(places)), list(reversed(range(places)))
    order = there if laps == 1 else there + (back if schedule == "zbv" else there)
    firsts = [place * strategy.devices for place in order]
    return tuple((share, first, str(strategy)) for share, first in zip(_shares(dice, len(firsts)), firsts, strict=True)), schedule


def _unlike(dice: random.Random) -> tuple[tuple[Part, ...], str]:
    """A strategy of its own for each stage, on ranks that follow one another."""
    counts = dice.choice(_UNLIKE)
    firsts = [sum(counts[:index]) for index in range(len(counts))]
    strategies = [_exact(dice, count) for count in counts]
    return _parts(dice, firsts, strategies), dice.choice(("gpipe", "1f1b", "zb-h1"))


def _sharing(dice: random.Random) -> tuple[tuple[Part, ...], str]:
    """Stages on ranks that they share; all ranks have work."""
    world = dice.randrange(1, 5)
    strategies = [_exact(dice, dice.randrange(1, world + 1)) for _ in range(dice.choice((2, 3, 4)))]
    firsts = [dice.randrange(world - strategy.devices + 1) for strategy in strategies]
    used = {rank for first, strategy in zip(firsts, strategies, strict=True) for rank in range(first, first + strategy.devices)}
    if used != set(range(world)):
        strategies[0], firsts[0] = _exact(dice, world), 0
    return _parts(dice, firsts, strategies), dice.choice(("gpipe", "1f1b", "interleaved", "zb-h1"))


def _parts(dice: random.Random, firsts: list[int], strategies: list[Strategy]) -> tuple[Part, ...]:
    shares = _shares(dice, len(firsts))
    return tuple((share, first, str(strategy)) for share, first, strategy in zip(shares, firsts, strategies, strict=True))


def _shares(dice: random.Random, count: int) -> list[int]:
    return [1] * count if dice.random() < 0.4 else [dice.randrange(1, 5) for _ in range(count)]


def _exact(dice: random.Random, devices: int) -> Strategy:
    """A strategy of exactly so many ranks."""
    sizes = dict.fromkeys(AXES, 1)
    for factor in _factors(devices):
        sizes[dice.choice(AXES)] *= factor
    return _strategy_of(dice, sizes)


def _factors(number: int) -> list[int]:
    return next(([factor, *_factors(number // factor)] for factor in range(2, number + 1) if number % factor == 0), [])


def _strategy(dice: random.Random, most: int) -> Strategy:
    """A strategy of at most so many ranks, of two at least if that is allowed."""
    return _exact(dice, dice.randrange(min(2, most), most + 1))


def _strategy_of(dice: random.Random, sizes: Mapping[str, int]) -> Strategy:
    return Strategy(
        **sizes,
        zero=dice.choice((0, 0, 1, 2, 3)) if sizes["dp"] * sizes["cp"] * sizes["sp"] > 1 else 0,
        recompute=dice.choice(("none", "none", "full", "selective")),
        sequence_parallel=dice.random() < 0.7,
        vocab_parallel=dice.random() < 0.7,
    )


def _fits(case: ParityCase) -> bool:
    """Are there blocks, heads and a sequence to split so? Of the zoo this much is known without building it."""
    heads, shared, layers = (
        case.sizes.get(name, usual) for name, usual in (("heads", 4), ("shared", 1 if case.sizes else 2), ("layers", 3))
    )
    name = case.model.removeprefix(ZOO)
    has_sequence = case.model in MODELS or zoo.find(name).sequence
    return (
        len(case.stages) <= layers + 2
        and all(heads // shared % (strategy.tp * strategy.sp) == 0 for strategy in case.strategies)
        and (has_sequence or all(strategy.cp * strategy.sp == 1 for strategy in case.strategies))
        and not (name in WHOLE_BATCH and case.micro_batches > 1)
    )


# -- numbers and shapes -----------------------------------------------------------------------------------------------------------------


def _computed(dice: random.Random, case: ParityCase) -> ParityCase:
    """In which numbers, and with which masks."""
    experts, dtype = case.model.removeprefix(ZOO) in EXPERTS, dice.choice(("float32", "float64"))
    precision = dice.choice(list(PRECISIONS)) if dtype == "float32" and not experts and dice.random() < 0.3 else ""
    drops = case.model in MODELS and MODELS[case.model].drops and not case.stages and not precision and dice.random() < 0.3
    if case.micro_batches > 1 and any(strategy.dp > 1 for strategy in case.strategies):
        drops = False  # each rank cuts its own rows into micro-batches, which are then other rows than on one device
    fields = {"dtype": "float64" if experts else dtype, "precision": precision, "dropout": drops}
    return ParityCase(**{**vars(case), **fields, "own_trace": dice.random() < 0.1})


def _shaped(dice: random.Random, case: ParityCase) -> ParityCase:
    """Mostly rows and lengths that the plan can split."""
    rows = math.lcm(*(strategy.dp for strategy in case.strategies)) * case.micro_batches
    batch = rows * dice.randrange(1, max(2, min(4, 1 + 24 // rows)))
    step, least = 1, 2
    if case.model.startswith(ZOO):
        entry = zoo.find(case.model.removeprefix(ZOO))
        step, least = entry.step, entry.minimum
    length = least + step * dice.randrange(max(1, (25 - least) // step))
    if dice.random() >= _MISFITS:
        parts = math.lcm(step, *(s.cp * s.sp * (s.tp if s.sequence_parallel else 1) * (2 if s.cp > 1 else 1) for s in case.strategies))
        length = max(-(-least // parts), round(length / parts)) * parts
    return ParityCase(**{**vars(case), "batch": batch, "length": length})

"""The named schedules: GPipe, 1F1B, interleaved, ZB-H1, ZB-V."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise

from hgc import records
from hgc.errors import PlanError
from hgc.schedule.actions import Action, Kind, Schedule
from hgc.schedule.layout import Edge, Layout, chain, layout
from hgc.schedule.timeline import Policy, Progress, orders

Orders = list[list[Action]]


def make(name: str, ranks: Sequence[Sequence[int]], micro_batches: int, edges: Iterable[Edge] | None = None) -> Schedule:
    """The schedule ``name`` for stages on ``ranks``.

    Args:
        name: one of :data:`NAMES`.
        ranks: of each stage, in the order of the stages. Stages on the same ranks are virtual stages; numbers of ranks may differ.
        edges: (stage, later stage that reads it); default: each stage reads the one before.

    ``gpipe``: all forwards, then all backwards. ``1f1b``: as few micro-batches in flight as keep all busy (Narayanan et al. 2021).
    ``interleaved``: the same for several stages on each place, Megatron-LM's order where places take turns. ``zb-h1``: 1F1B with the
    weights' backward in the gaps, in as much memory as 1F1B's first stage (Qi et al. 2024, section 2.2). ``zbv``: two stages on each
    place, there and back (section 6).

    Raises:
        PlanError: an unknown name, or stages that the schedule cannot have.
    """
    if name not in ORDERS:
        raise PlanError(f"schedule is {name!r}; {records.suggestion(str(name), NAMES)}")
    wanted = layout(ranks, micro_batches, edges)
    lists: dict[int, tuple[Action, ...]] = {}
    for place, actions in zip(wanted.places, ORDERS[name](wanted), strict=True):
        lists.update(dict.fromkeys(place, tuple(_with_messages(wanted, actions))))
    return Schedule(tuple(lists[rank] for rank in range(len(lists))))


def _with_messages(wanted: Layout, actions: Iterable[Action]) -> Iterable[Action]:
    """Receives right in front of what needs them, sends right behind what made them."""
    for action in actions:
        stage, batch = action.stage, action.micro_batch
        sources, targets = wanted.remote(stage, wanted.before[stage]), wanted.remote(stage, wanted.after[stage])
        if action.kind == "F" and sources:
            yield Action(stage, "RECV_F", batch)
        if action.kind in ("B", "I") and targets:
            yield Action(stage, "RECV_B", batch)
        yield action
        if action.kind == "F" and targets:
            yield Action(stage, "SEND_F", batch)
        if action.kind in ("B", "I") and sources:
            yield Action(stage, "SEND_B", batch)


def _gpipe(wanted: Layout) -> Orders:
    batches = range(wanted.micro_batches)
    return [
        [Action(stage, "F", batch) for stage in stages for batch in batches]
        + [Action(stage, "B", batch) for stage in reversed(stages) for batch in batches]
        for stages in wanted.hosted
    ]


def _backward_first(action: Action) -> tuple[int, ...]:
    """Backward, then forward; late stages first."""
    return ("BF".index(action.kind), -action.stage, action.micro_batch)


def _1f1b(wanted: Layout) -> Orders:
    def allows(stage: int, progress: Progress) -> bool:
        return progress.ahead(stage) < wanted.depths[stage]

    return orders(wanted, Policy(allows, _backward_first))


def _zb_h1(wanted: Layout) -> Orders:
    """1F1B in which backwards of weights come later, the more the fewer stages follow, so that all hold as much as the first stage."""
    delays = [max(wanted.depths) - depth for depth in wanted.depths]
    return [_weights_later(actions, delays) for actions in _1f1b(wanted)]


def _weights_later(actions: Iterable[Action], delays: Sequence[int]) -> list[Action]:
    found: list[Action] = []
    waiting: list[Action] = []
    for action in actions:
        if action.kind != "B":
            found.append(action)
            continue
        found.append(Action(action.stage, "I", action.micro_batch))
        waiting.append(Action(action.stage, "W", action.micro_batch))
        due = [each for each in waiting if each.stage == action.stage and each.micro_batch + delays[each.stage] <= action.micro_batch]
        found += due
        waiting = [each for each in waiting if each not in due]
    return found + waiting


# -- several stages on each place -------------------------------------------------------------------------------------------------------


def _interleaved(wanted: Layout) -> Orders:
    if all(len(stages) == 1 for stages in wanted.hosted):
        return _1f1b(wanted)
    return _megatron(wanted) if _takes_turns(wanted) else _depth_first(wanted)


def _takes_turns(wanted: Layout) -> bool:
    """Is stage ``s`` of a chain on place ``s % places``, as often on each?"""
    count = len(wanted.places)
    regular = all(stages == tuple(range(place, len(wanted.stages), count)) for place, stages in enumerate(wanted.hosted))
    return regular and len(wanted.stages) % count == 0 and wanted.edges == chain(len(wanted.stages))


def _groups(wanted: Layout) -> list[range]:
    """Micro-batches that pass one stage after the other: as many as there are places, or a few more where they do not divide."""
    rounds = max(1, wanted.micro_batches // len(wanted.places))
    borders = [-(-wanted.micro_batches * index // rounds) for index in range(rounds + 1)]
    return [range(low, high) for low, high in pairwise(borders)]


def _megatron(wanted: Layout) -> Orders:
    groups = _groups(wanted)
    return [_one_after_the_other(stages, groups, 2 * (len(wanted.places) - 1 - place)) for place, stages in enumerate(wanted.hosted)]


def _one_after_the_other(stages: Sequence[int], groups: Sequence[range], extra: int) -> list[Action]:
    """Warm up, then one forward and one backward in turn, then the rest of the backwards."""
    forwards = [Action(stage, "F", batch) for group in groups for stage in stages for batch in group]
    backwards = [Action(stage, "B", batch) for group in groups for stage in reversed(stages) for batch in group]
    warmup = min(len(forwards), (len(stages) - 1) * len(groups[0]) + extra)
    steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def _depth_first(wanted: Layout) -> Orders:
    """The same priorities and numbers in flight for places that do not take turns."""
    count = len(wanted.places)
    limits = [(len(stages) - 1) * count + 2 * (count - 1 - place) + 1 for place, stages in enumerate(wanted.hosted)]
    group_of = {batch: number for number, group in enumerate(_groups(wanted)) for batch in group}

    def allows(stage: int, progress: Progress) -> bool:
        return all(sum(progress.ahead(other) for other in wanted.hosted[p]) < limits[p] for p in wanted.places_of[stage])

    def priority(action: Action) -> tuple[int, ...]:
        stage = action.stage if action.kind == "F" else -action.stage
        return ("BF".index(action.kind), group_of[action.micro_batch], stage, action.micro_batch)

    return orders(wanted, Policy(allows, priority))


def _zbv(wanted: Layout) -> Orders:
    count = len(wanted.places)
    there_and_back = tuple((place, 2 * count - 1 - place) for place in range(count))
    if wanted.hosted != there_and_back or wanted.edges != chain(2 * count):
        raise PlanError(
            "zbv needs a chain of two stages on each group of ranks, the second ones in reverse order (stages 0 and 3 together, 1 and 2); "
            "lay the stages out so, or take zb-h1"
        )

    return [_phases(first, second, count, wanted.micro_batches) for first, second in wanted.hosted]


def _phases(first: int, second: int, places: int, micro_batches: int) -> list[Action]:
    """Forwards until the last stage is reached, forward and backward of both stages in turn, then the backwards that are left."""
    batches = max(micro_batches, 2 * places - 1)  # a shorter step is a longer one without its last micro-batches
    later = places - first
    kinds: list[tuple[int, Kind]] = []

    def take(times: int, *phase: tuple[int, Kind]) -> None:
        kinds.extend(phase * times)

    take(2 * later - 1, (first, "F"))
    take(first, (second, "F"), (first, "F"))
    take(later, (second, "F"), (second, "I"), (second, "W"))
    backwards: tuple[tuple[int, Kind], ...] = ((first, "I"), (first, "W"), (second, "F"), (second, "I"), (second, "W"))
    unstarted = batches - kinds.count((first, "F"))
    take(unstarted, (first, "F"), *backwards)
    take(batches - places - unstarted, *backwards)
    take(first, (first, "I"), (second, "I"))
    take(later, (first, "I"), (first, "W"))
    take(first, (second, "W"))
    take(first, (first, "W"))
    numbers = Counter[tuple[int, Kind]]()
    actions = []
    for stage, kind in kinds:
        actions.append(Action(stage, kind, numbers[stage, kind]))
        numbers[stage, kind] += 1
    return [action for action in actions if action.micro_batch < micro_batches]


ORDERS: dict[str, Callable[[Layout], Orders]] = {
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved": _interleaved,
    "zb-h1": _zb_h1,
    "zbv": _zbv,
}
NAMES = tuple(ORDERS)

"""``emit_stages``: the source of ``program.py`` for a pipeline: each block class once, one model for stages alike, the schedule as text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

from hgc.backends.torchrun.declarations import data_axes
from hgc.backends.torchrun.emit import class_lines, declared_state, unused_lines, unused_state
from hgc.backends.torchrun.header import import_lines
from hgc.backends.torchrun.layout import WIDTH, indent
from hgc.backends.torchrun.model import init_lines, make_forward
from hgc.backends.torchrun.names import MODULE_NAMES, Scope
from hgc.backends.torchrun.root import Call, read_calls, used_outputs
from hgc.backends.torchrun.sizes import Symbols
from hgc.backends.torchrun.stages_plan import plan_lines, stage_docstring
from hgc.errors import ArtifactError
from hgc.ir.hashing import body_hash
from hgc.ir.program import BODIES, Program
from hgc.plan import Plan
from hgc.schedule import Schedule

_FIRST = "\0{}\0"
"""Stands in a model's source for where its n-th list of blocks starts, which is all that may differ between stages alike."""


@dataclass(frozen=True)
class _Model:
    """Source of a stage's model, the places where its lists start, and the stage."""

    lines: tuple[str, ...]
    firsts: tuple[int, ...]
    lists: tuple[str, ...]
    stage: int


def emit_stages(stages: Sequence[Program], plan: Plan, schedule: Schedule) -> str:
    """The source for stages that are lowered as ``plan`` says and work in the order of ``schedule``.

    The same stages, plan and schedule give the same text; its length grows with the number of unlike stages, a few lines for each
    stage, and the schedule. Raises :class:`~hgc.errors.ArtifactError` for an operator that has no source form, and for another number
    of stages than the plan's.
    """
    if len(stages) != len(plan.stages):
        raise ArtifactError(f"there are {len(stages)} lowered stages, the plan has {len(plan.stages)}; cut the program by this plan")
    stages = _unified(stages)
    symbols = _symbols(stages)
    scope = Scope(MODULE_NAMES | {"SCHEDULE", "STAGES"})
    calls = [read_calls(stage, of_stage=True) for stage in stages]
    classes = {name: scope.take(name, "Block") for name in dict.fromkeys(name for stage in stages for name in stage.bodies)}
    rest = [*_schedule_lines(schedule), "", *plan_lines(stages, plan, symbols)]
    for name in classes:
        own = [(stage, call) for stage, found in zip(stages, calls, strict=True) for call in found if call.block.body == name]
        program = own[0][0]
        named = replace(symbols, mesh=dict(program.mesh))
        rest += ["", "", *class_lines(own, classes[name], used_outputs(program)[name], named)]
    unused = [unused_state(stage) for stage in stages]
    unused_class = scope.take("Unused") if any(unused) else ""
    for stage, state in zip(stages, unused, strict=True):
        if state:
            rest += ["", "", *unused_lines(unused_class, state, data_axes(stage.state, stage.mesh))]
    models = [
        _model(index, stage, found, classes, unused_class if unused[index] else "")
        for index, (stage, found) in enumerate(zip(stages, calls, strict=True))
    ]
    made: dict[int, str] = {}
    for group in _alike(models):
        rest += ["", "", *_class_of(group, scope.take(_stage_name(group, len(stages)), "Stage"), made)]
    rest += ["", "", *_listed([made[index] for index in range(len(stages))])]
    rest += ["", "", 'if __name__ == "__main__":', "    rt.main(STAGES, PLAN)", ""]
    text = "\n".join(rest)
    return "\n".join([*stage_docstring(stages, plan, symbols), "", *import_lines(text), "", text])


def _symbols(stages: Sequence[Program]) -> Symbols:
    """One name for each symbol in the whole file."""
    union = replace(stages[0], symbols={symbol: found for stage in stages for symbol, found in stage.symbols.items()})
    return Symbols.of(union)


# -- classes of blocks ----------------------------------------------------------------------------------------------------------------


def _unified(stages: Sequence[Program]) -> list[Program]:
    """Copies in which a body has one name in all stages, and different bodies different ones."""
    names: dict[tuple[object, ...], str] = {}
    taken: set[str] = set()
    unified = []
    for stage in stages:
        made = stage.copy()
        calls = read_calls(made, of_stage=True)
        renamed: dict[str, str] = {}
        for name in made.bodies:
            key = _identity(made, name, [call for call in calls if call.block.body == name])
            if key not in names:
                names[key] = _free(name, taken)
                taken.add(names[key])
            renamed[name] = names[key]
        bodies = {name: made.body(name) for name in renamed}
        for name in bodies:
            delattr(made.root.get_submodule("bodies"), name)
        for name, body in bodies.items():
            made.add_body(renamed[name], body)
        for block in list(made.blocks()):
            block.node.target = BODIES + renamed[block.body]
        unified.append(made)
    return unified


def _identity(stage: Program, name: str, calls: Sequence[Call]) -> tuple[object, ...]:
    """What blocks of one class have in common: computation, mesh, and what they declare."""
    body = stage.body(name)
    return body_hash(body), tuple(stage.mesh.items()), bool(calls[0].block.path), tuple(declared_state(stage, calls[0], body.graph))


def _free(name: str, taken: set[str]) -> str:
    candidate, count = name, 2
    while candidate in taken:
        candidate, count = f"{name}_{count}", count + 1
    return candidate


# -- models ---------------------------------------------------------------------------------------------------------------------------


def _model(index: int, stage: Program, calls: Sequence[Call], classes: Mapping[str, str], unused: str) -> _Model:
    lists = [group for group in dict.fromkeys(call.group for call in calls) if group.is_list]
    firsts = {group: _FIRST.format(position) for position, group in enumerate(lists)}
    body = list(init_lines(calls, classes, firsts))
    if unused:
        body.append(f"self.{Scope({call.group.attribute for call in calls}).take('unused')} = {unused}()")
    lines = [*indent(["super().__init__()", *body], 2), "", *indent(make_forward(stage, calls))]
    return _Model(tuple(lines), tuple(group.first for group in lists), tuple(group.attribute for group in lists), index)


def _alike(models: Sequence[_Model]) -> list[list[_Model]]:
    """Models with one source, in the order of their first stages."""
    groups: dict[tuple[str, ...], list[_Model]] = {}
    for model in models:
        groups.setdefault(model.lines, []).append(model)
    return list(groups.values())


def _stage_name(group: Sequence[_Model], stages: int) -> str:
    indices = [model.stage for model in group]
    if len(group) > 1:
        return "MiddleStage"
    return "FirstStage" if indices == [0] else "LastStage" if indices == [stages - 1] else f"Stage{indices[0]}"


def _class_of(group: Sequence[_Model], name: str, made: dict[int, str]) -> Iterator[str]:
    """One class; where a list starts is an argument if it differs between the stages of the class. Notes how each stage is made."""
    varying = [position for position in range(len(group[0].firsts)) if len({model.firsts[position] for model in group}) > 1]
    names = {position: "first" if len(varying) == 1 else f"first_{group[0].lists[position]}" for position in varying}
    indices = ", ".join(str(model.stage) for model in group)
    yield f"class {name}(rt.Model):  # stage{'s' if len(group) > 1 else ''} {indices}"
    arguments = "".join(f", {names[position]}: int" for position in varying)
    yield f"    def __init__(self{arguments}) -> None:"
    lines = list(group[0].lines)
    for position, first in enumerate(group[0].firsts):
        where = names.get(position, str(first) if first else "")
        lines = [text for line in lines for text in _with_first(line, _FIRST.format(position), where)]
    yield from lines
    for model in group:
        given = ", ".join(f"{names[position]}={model.firsts[position]}" for position in varying)
        made[model.stage] = f"rt.stage({name}, {given})" if given else name


def _with_first(line: str, mark: str, first: str) -> Iterator[str]:
    """The line with what ``mark`` stands for; ``""`` leaves the argument out, which may be all of the line."""
    if first:
        yield line.replace(mark, first)
    elif line.strip() != f"first={mark},":
        yield line.replace(f", first={mark}", "")


def _listed(made: Sequence[str]) -> Iterator[str]:
    one_line = f"STAGES = ({', '.join(made)}{',' if len(made) == 1 else ''})"
    if len(one_line) <= WIDTH:
        yield one_line
        return
    yield "STAGES = ("
    yield from indent(f"{text}," for text in made)
    yield ")"


# -- the schedule ---------------------------------------------------------------------------------------------------------------------


def _schedule_lines(schedule: Schedule) -> Iterator[str]:
    """What each rank does in a step, one paragraph for ranks that do the same; a backslash joins its lines."""
    yield 'SCHEDULE = """'
    for line in str(schedule).splitlines():
        first, *more = wrap(line, WIDTH - 2, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        lines = [first, *more]
        yield from (f"{text} \\" for text in lines[:-1])
        yield lines[-1]
    yield '"""'

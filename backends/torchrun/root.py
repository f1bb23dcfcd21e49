"""The root graph as a sequence of calls: which block, which values in, which values out."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from hgc.backends.torchrun.names import Scope, identifier
from hgc.backends.torchrun.naming import snake
from hgc.ir.program import Block, Program
from hgc.ir.value import info
from hgc.runtime.modules import Model


@dataclass(frozen=True)
class Group:
    """One attribute of the model: a list of blocks (``template`` with ``{}``), one block with a place, or glue (``template == ""``).

    ``first`` is the position of a list's first block in the user's model.
    """

    attribute: str
    template: str
    bodies: tuple[str, ...]
    is_list: bool
    first: int = 0


@dataclass(frozen=True)
class Call:
    """A block call: ``results`` are the root nodes of the outputs that its body returns (``None`` where this call's is not used)."""

    block: Block
    group: Group
    index: int | None
    arguments: tuple[fx.Node, ...]
    results: tuple[fx.Node | None, ...]

    @property
    def recompute(self) -> bool:
        """Does the block run again in backward?"""
        return info(self.block.node).recompute


_NUMBER = re.compile(r"(?:^|(?<=\.))(\d+)(?=\.|$)")


def used_outputs(program: Program) -> dict[str, list[int]]:
    """Body name -> positions of the outputs that any call uses."""
    used: dict[str, set[int]] = {name: set() for name in program.bodies}
    for block in program.blocks():
        used[block.body] |= {index for index, _ in _outputs(block.node)}
    return {name: sorted(found) for name, found in used.items()}


def _outputs(node: fx.Node) -> list[tuple[int, fx.Node]]:
    found = []
    for user in node.users:
        assert user.target is operator.getitem
        assert isinstance(user.args[1], int)
        if user.users:
            found.append((user.args[1], user))
    return sorted(found, key=lambda pair: pair[0])


def read_calls(program: Program, of_stage: bool = False) -> list[Call]:
    """The calls in execution order, blocks of one list under one attribute; a pipeline stage may have a part of a list, one block even."""
    blocks = list(program.blocks())
    groups = _groups(blocks, _lists(blocks, of_stage))
    used = used_outputs(program)
    calls = []
    for block in blocks:
        group, index = groups[_key(block)]
        by_index = dict(_outputs(block.node))
        arguments = tuple(a for a in block.node.args if isinstance(a, fx.Node) and info(a).role not in ("parameter", "buffer"))
        calls.append(Call(block, group, index, arguments, tuple(by_index.get(i) for i in used[block.body])))
    return calls


def _key(block: Block) -> tuple[str, str]:
    """Calls of one module share parameters and so an attribute, unless lowering gave them different bodies."""
    return block.path, block.body


def _groups(blocks: Sequence[Block], lists: Mapping[str, tuple[int, tuple[str, ...]]]) -> dict[tuple[str, str], tuple[Group, int | None]]:
    scope = Scope(dir(Model()))
    places = {block.path: _place(block.path) for block in blocks if block.path}
    names = _attributes(list(dict.fromkeys(place[0] if place and place[0] in lists else path for path, place in places.items())))
    found: dict[tuple[str, str], tuple[Group, int | None]] = {}
    made: dict[str, Group] = {}
    for block in blocks:
        key = _key(block)
        if key in found:
            continue
        place = _place(block.path)
        if place is not None and place[0] in lists:
            template, index = place
            first, bodies = lists[template]
            if template not in made:
                made[template] = Group(scope.take(names[template], "blocks"), template, bodies, True, first)
            found[key] = made[template], index - first
        else:
            name = names[block.path] if block.path else snake(block.body)
            found[key] = Group(scope.take(name, "block"), block.path, (block.body,), False), None
    return found


def _attributes(paths: Sequence[str]) -> dict[str, str]:
    """An attribute for each path or template: its last word, with as many words before it as tell it from the others."""
    words = {path: [part for part in path.split(".") if part != "{}"] for path in paths}
    chosen: dict[str, str] = {}
    for path, own in words.items():
        count = 1
        while count < len(own) and (
            own[-count].isdigit() or any(other[-count:] == own[-count:] for p, other in words.items() if p != path)
        ):
            count += 1
        chosen[path] = identifier("_".join(own[-count:]) or "blocks", "blocks")
    return chosen


def _lists(blocks: Sequence[Block], of_stage: bool) -> dict[str, tuple[int, tuple[str, ...]]]:
    """Templates whose positions follow one another from 0 (in a stage: from any first one) with one body each: first, bodies."""
    bodies: dict[str, dict[int, set[str]]] = {}
    for block in blocks:
        place = _place(block.path)
        if place is not None:
            bodies.setdefault(place[0], {}).setdefault(place[1], set()).add(block.body)
    whole = {}
    for template, by_index in bodies.items():
        first = min(by_index) if of_stage else 0
        complete = sorted(by_index) == list(range(first, first + len(by_index))) and (of_stage or len(by_index) > 1)
        if complete and all(len(names) == 1 for names in by_index.values()):
            whole[template] = first, tuple(next(iter(by_index[first + i])) for i in range(len(by_index)))
    return whole


def _place(path: str) -> tuple[str, int] | None:
    """``model.layers.3`` -> ``model.layers.{}``, 3."""
    matches = list(_NUMBER.finditer(path))
    if not matches or "{" in path or "}" in path:
        return None
    last = matches[-1]
    if str(int(last[1])) != last[1]:
        return None
    return f"{path[: last.start(1)]}{{}}{path[last.end(1) :]}", int(last[1])


def class_list(names: Sequence[str], classes: Mapping[str, str]) -> str:
    """Source of a list of classes: runs and repeating patterns multiplied."""
    given = [classes[name] for name in names]
    for period in range(1, min(len(given) // 2, 8) + 1):
        if len(given) % period == 0 and given == given[:period] * (len(given) // period):
            return f"[{', '.join(given[:period])}] * {len(given) // period}"
    runs: list[list[str]] = []
    for name in given:
        if runs and runs[-1][0] == name:
            runs[-1].append(name)
        else:
            runs.append([name])
    if all(len(run) == 1 for run in runs):
        return f"[{', '.join(given)}]"
    return " + ".join(f"[{run[0]}] * {len(run)}" if len(run) > 1 else f"[{run[0]}]" for run in runs)

"""Names come from users' models and may be any text: none can break the source, or become part of what it does."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import nn

from hgc.backends.torchrun import emit
from hgc.ir.program import Program
from hgc.plan import Plan
from tests.backends.emitted import run_both
from tests.backends.programs import Labels, make_program

HOSTILE = [
    "__import__('os').system('true')",
    '"""\nimport os\n"""',
    "x\nimport os\n#",
    "a');raise SystemExit('",
    "{__import__}",
    "{}",
    "%s",
    "\\",
    "\\N{BULLET}",
    "\r\n\x0c\x85\u2028",
    "\u202e",
    "class",
    "None",
    "self",
    "super",
    "torch",
    "F",
    "rt",
    "ops",
    "PLAN",
    "Model",
    "tensor",
    "i",
    "range",
    "x",
    "é",
    "ﬁ",
    "变量",
    "0",
    "-1",
    "1e5",
    "__init__",
    "__class__",
    "print",
    " ",
    "'",
    '"',
    "#",
    "a" * 200,
]
IMPORTS = {"torch", "torch.nn.functional", "hgc", "hgc.runtime"}
CALLED = {"super", "range", "rt", "ops", "F", "torch", "self", "str", "block", "blocks"}
"""Names at the root of what emitted source may call, next to methods of its own variables."""


def _usable(part: str) -> bool:
    """torch itself refuses the others as names of modules and parameters."""
    return bool(part) and "." not in part and not hasattr(nn.Module(), part)


part = st.sampled_from(HOSTILE).filter(_usable) | st.text(min_size=1, max_size=12).filter(_usable)
path = st.lists(part, min_size=1, max_size=3).map(".".join)
free = st.text(max_size=20) | st.sampled_from(HOSTILE)


@st.composite
def labels(draw: st.DrawFn) -> Labels:
    parameter, other = draw(st.lists(part, min_size=2, max_size=2, unique=True))
    before = draw(st.just("") | path.map(lambda p: p + "."))
    return Labels(
        model=draw(free),
        body=draw(part.filter(lambda name: name != "Head")),
        places=tuple(draw(st.lists(path, min_size=1, max_size=3, unique=True)))
        if draw(st.booleans())
        else ("layers.0", "layers.1", "layers.2"),
        parameter=before + parameter,
        other=before + other,
        argument=draw(part.filter(lambda name: name != "self")),
        symbol=draw(part),
        meaning=draw(free),
        path=draw(free),
        report=tuple(draw(st.lists(free, max_size=2))),
    )


def _buildable(found: Labels) -> Program | None:
    """torch refuses trees in which a name is a module and a parameter at once."""
    try:
        return make_program(found)
    except (KeyError, AttributeError, TypeError):
        return None


@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
@given(labels())
@example(Labels(parameter="a\nimport os", places=("layers.0\n", "layers.1\n")))
@example(Labels(parameter="{}", places=("{}.0", "{}.1", "{}.2")))
@example(Labels(argument="class"))
@example(Labels(argument="i"))
@example(Labels(symbol="F", argument="F"))
def test_any_names_give_a_program_that_runs(found: Labels) -> None:
    program = _buildable(found)
    if program is None:
        return
    source = emit(program, Plan(program_hash=found.meaning, notes=(found.model,)))
    check_harmless(source)
    state = {name: torch.rand([int(s) for s in entry.value.shape]) for name, entry in program.state.items()}
    expected, emitted = run_both(program, state, {str(program.inputs()[0].target): torch.rand(6, 4)}, source)
    assert torch.equal(expected, emitted), source


def check_harmless(source: str) -> None:
    """Only the statements, imports and calls that emitted programs are made of."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = ast.parse(source)
        compile(source, "program.py", "exec")
    for statement in tree.body:
        assert isinstance(statement, ast.Expr | ast.Import | ast.ImportFrom | ast.Assign | ast.ClassDef | ast.If), ast.dump(statement)
    assert isinstance(tree.body[0], ast.Expr)
    assert isinstance(tree.body[0].value, ast.Constant)
    assert [ast.unparse(s.targets[0]) for s in tree.body if isinstance(s, ast.Assign)] == ["PLAN"]
    assert [ast.unparse(s.test) for s in tree.body if isinstance(s, ast.If)] == ["__name__ == '__main__'"]
    variables = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    variables |= {argument.arg for node in ast.walk(tree) if isinstance(node, ast.arguments) for argument in _arguments(node)}
    classes = {statement.name for statement in tree.body if isinstance(statement, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) in IMPORTS
        elif isinstance(node, ast.Call):
            root = _root(node.func)
            assert root in CALLED | variables | classes, ast.unparse(node)
        elif isinstance(node, ast.Name) and node.id.startswith("__"):
            assert node.id == "__name__"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("__"):
            assert node.attr == "__init__"


def _arguments(found: ast.arguments) -> Iterator[ast.arg]:
    yield from found.args
    if found.kwarg is not None:
        yield found.kwarg


def _root(function: ast.expr) -> str:
    while isinstance(function, ast.Attribute | ast.Subscript | ast.Call):
        function = function.func if isinstance(function, ast.Call) else function.value
    return function.id if isinstance(function, ast.Name) else ""


@pytest.mark.parametrize("hostile", HOSTILE)
def test_every_place_at_once(hostile: str) -> None:
    named = {name: hostile for name in ("model", "symbol", "meaning", "path") if name != "symbol" or hostile.strip()}
    usable = {"argument": hostile} if _usable(hostile) and hostile != "self" else {}
    program = make_program(Labels(report=(hostile,), **named, **usable))
    source = emit(program, Plan(program_hash=hostile))
    check_harmless(source)
    state = {name: torch.rand([int(s) for s in entry.value.shape]) for name, entry in program.state.items()}
    expected, emitted = run_both(program, state, {str(program.inputs()[0].target): torch.rand(6, 4)}, source)
    assert torch.equal(expected, emitted), source

"""The top of an emitted file: what it is, how to start it, and ``PLAN``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from textwrap import wrap

import torch
from torch import fx

from hgc.backends.torchrun.bounds import is_integer, upper_bound
from hgc.backends.torchrun.declarations import data_axes
from hgc.backends.torchrun.expressions import sequence
from hgc.backends.torchrun.layout import indent, split_items, wrapped
from hgc.backends.torchrun.names import comment, quote
from hgc.backends.torchrun.sizes import Symbols
from hgc.ir.placement import Placement, Shard, zigzag_runs
from hgc.ir.program import STATE, Program, SymbolInfo
from hgc.ir.value import value
from hgc.plan import Plan, Precision
from hgc.strategy import ZERO_STAGES

CONSTANTS = "constants.pt"
"""File next to ``program.py`` with the values of buffers that no checkpoint holds."""

_WIDTH = 132


def docstring(program: Program, plan: Plan, symbols: Symbols) -> Iterator[str]:
    ranks = plan.devices
    mesh = " x ".join(f"{axis} {size}" for axis, size in program.mesh.items())
    yield f'"""{comment(program.name)} on {ranks} process{"es" * (ranks > 1)}{f": {comment(mesh)}" if mesh else ""}.'
    yield ""
    made_from = f" (program {comment(plan.program_hash[:12])})" if plan.program_hash else ""
    yield from paragraph(
        f"Written by hgc for the plan '{comment(str(plan.strategy))}'{made_from}. Every rank runs this file; edit it freely."
    )
    yield ""
    yield f"    torchrun --nproc-per-node {ranks} program.py --steps 20"
    yield ""
    yield from paragraph(legend(program, symbols))
    if program.report:
        yield ""
        yield "Assumptions:"
        for sentence in program.report:
            yield from paragraph(comment(sentence), "  - ")
    yield '"""'


def legend(program: Program, symbols: Symbols) -> str:
    named = [f"{symbols.names[symbol]} is the {comment(found.meaning)}" for symbol, found in program.symbols.items()]
    listed = ", ".join(named[:-1]) + (" and " if len(named) > 1 else "") + "".join(named[-1:])
    if not program.mesh:
        return f"Comments give shapes{': ' + listed if named else ''}."
    sizes = f" {listed} of all ranks together." if named else ""
    return (
        f"Comments give the shape of what one rank holds.{sizes} Behind an axis stands where a value lives on it: S(d) split along dim d, "
        f"{_zigzag(program)}P a summand, I the same everywhere, R the same everywhere while its gradient is still a summand."
    )


def _zigzag(program: Program) -> str:
    ranks = next((program.mesh[axis] for node in program.inputs() for axis, p in value(node).placements if _in_zigzag(p)), 0)
    if not ranks:
        return ""
    return f"S(d,zigzag) split so that rank r has chunks r and {2 * ranks - 1} - r of {2 * ranks} (equal work under a causal mask), "


def _in_zigzag(placement: Placement) -> bool:
    return isinstance(placement, Shard) and zigzag_runs(placement.parts) is not None


def paragraph(text: str, first: str = "") -> list[str]:
    return wrap(text, _WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_long_words=True)


def plan_lines(program: Program, plan: Plan, symbols: Symbols) -> Iterator[str]:
    """The constant ``PLAN``, one field a line."""
    inputs = {str(node.target): _input(program, node, symbols) for node in program.inputs()}
    sizes = {
        symbols.names[symbol]: f"rt.Symbol({quote(found.meaning)}, {range_text(found)}default={found.hint})"
        for symbol, found in program.symbols.items()
    }
    fields = [
        (
            f"mesh={mapping({axis: str(size) for axis, size in program.mesh.items()})}",
            "outermost axis first" if len(program.mesh) > 1 else "",
        ),
        (f"symbols={mapping(sizes)}" if sizes else "", ""),
        (f"inputs={mapping(inputs)}", ""),
        (f"zero={plan.strategy.zero}", ZERO_STAGES[plan.strategy.zero] if plan.strategy.zero else ""),
        (f"precision={precision_text(plan.precision)}" if plan.precision != Precision() else "", ""),
        (f"micro_batches={plan.micro_batches}" if plan.micro_batches > 1 else "", "parts of a rank's batch, one after the other"),
    ]
    if program.mesh:
        fields.append((f"data_axes={sequence(map(quote, data_axes(program.state, program.mesh)))}", ""))
    if assumed := _assumptions(program, symbols):
        fields.append((f"assumptions={sequence(map(quote, assumed))}", ""))
    if tied := tied_names(program):
        fields.append((f"tied={mapping({alias: quote(name) for alias, name in tied.items()})}", ""))
    if constants_of(program):
        fields.append((f"constants={quote(CONSTANTS)}", ""))
    yield "PLAN = rt.PlanInfo("
    for text, remark in fields:
        if text:
            *first, last = _exploded(text) if "={" in text and "rt." in text else wrapped(text, _WIDTH)
            yield from indent([*first, f"{last},{f'  # {remark}' if remark else ''}"])
    yield ")"


def precision_text(precision: Precision) -> str:
    given = ((field.name, getattr(precision, field.name)) for field in fields(precision))
    return f"rt.Precision({', '.join(f'{name}={quote(dtype)}' for name, dtype in given if dtype)})"


def _exploded(text: str) -> list[str]:
    """``name={...}`` with one entry a line."""
    name, _, rest = text.partition("={")
    return [f"{name}={{", *indent(f"{entry}," for entry in split_items(rest[:-1])), "}"]


def range_text(found: SymbolInfo) -> str:
    low = f"low={found.low}, " if found.low > 1 else ""
    return low + (f"high={found.high}, " if found.high is not None else "")


def mapping(entries: Mapping[str, str]) -> str:
    return f"{{{', '.join(f'{quote(key)}: {text}' for key, text in entries.items())}}}"


def _input(program: Program, node: fx.Node, symbols: Symbols) -> str:
    found = value(node)
    shape = sequence(str(int(size)) if size.is_Integer else quote(symbols.text(size)) for size in found.shape)
    placed = {axis: quote(str(p)) for axis, p in found.placements if isinstance(p, Shard)}
    given = [shape, str(found.dtype)]
    given += [mapping(placed)] if placed else []
    if found.dtype != torch.bool and is_integer(node):
        bound = upper_bound(program, node)
        given += [f"high={bound}"] if bound is not None else []
    return f"rt.Input({', '.join(given)})"


def _assumptions(program: Program, symbols: Symbols) -> list[str]:
    """Relations between sizes that tracing and lowering rely on."""
    return [symbols.text(relation) for relation in program.assumptions]


def tied_names(program: Program) -> dict[str, str]:
    """Further name -> the name that is declared."""
    return {alias: entry.name for entry in program.state.values() for alias in entry.aliases}


def constants_of(program: Program) -> dict[str, torch.Tensor]:
    """Values that the program needs and no checkpoint holds, by name."""
    read = {str(node.target).removeprefix(STATE) for node in program.root.graph.nodes if node.op == "get_attr"}
    return {name: entry.data for name, entry in program.state.items() if entry.data is not None and (name in read or entry.persistent)}


def import_lines(text: str) -> Iterator[str]:
    """What the rest of the file uses, no more."""

    def used(name: str) -> bool:
        return re.search(rf"(?<![\w.\"']){name}\b", text) is not None

    plain: Sequence[tuple[str, str]] = (("math", "import math"),)
    yield from (line for name, line in plain if used(name + r"\."))
    if used(r"math\."):
        yield ""
    for name, line in (("torch", "import torch"), ("F", "import torch.nn.functional as F"), ("Tensor", "from torch import Tensor")):
        if used(name):
            yield line
    yield ""
    yield "from hgc import runtime as rt"
    if used(r"ops\."):
        yield "from hgc.runtime import ops"

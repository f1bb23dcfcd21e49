"""The top of an emitted pipeline: what it is, how to start it, and ``PLAN`` with all stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import fx

from hgc.backends.torchrun.bounds import is_integer, upper_bound
from hgc.backends.torchrun.declarations import data_axes
from hgc.backends.torchrun.expressions import sequence
from hgc.backends.torchrun.header import CONSTANTS, constants_of, legend, mapping, paragraph, precision_text, range_text, tied_names
from hgc.backends.torchrun.layout import indent, wrapped
from hgc.backends.torchrun.model import parameter_names
from hgc.backends.torchrun.names import comment, quote
from hgc.backends.torchrun.sizes import Symbols
from hgc.ir.placement import Placement, Shard
from hgc.ir.program import RECEIVED, Program
from hgc.ir.value import Value, info, value
from hgc.plan import Plan, Precision

_WIDTH = 132


def stage_docstring(stages: Sequence[Program], plan: Plan, symbols: Symbols) -> Iterator[str]:
    """The file's docstring."""
    name = stages[0].name.rpartition("Stage")[0] or stages[0].name
    yield f'"""{comment(name)} on {plan.devices} processes: a pipeline of {len(stages)} stages.'
    yield ""
    made_from = f" (program {comment(plan.program_hash[:12])})" if plan.program_hash else ""
    yield from paragraph(f"Written by hgc{made_from}. Every rank runs this file; edit it freely.")
    yield ""
    for index, strategy in enumerate(plan.strategies):
        ranks = plan.ranks(index)
        where = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"
        count = plan.stages[index].blocks
        yield f"    stage {index}: {count} block{'s' * (count > 1)} on {where}, {comment(str(strategy))}"
    yield ""
    yield f"    torchrun --nproc-per-node {plan.devices} program.py --steps 20"
    yield ""
    distributed = next((stage for stage in stages if stage.mesh), stages[0])
    yield from paragraph(legend(distributed, symbols))
    report = list(dict.fromkeys(sentence for stage in stages for sentence in stage.report))
    if report:
        yield ""
        yield "Assumptions:"
        for sentence in report:
            yield from paragraph(comment(sentence), "  - ")
    yield '"""'


def plan_lines(stages: Sequence[Program], plan: Plan, symbols: Symbols) -> Iterator[str]:
    """The constant ``PLAN``, behind ``SCHEDULE``."""
    known = {symbol: found for stage in stages for symbol, found in stage.symbols.items()}
    sizes = {
        symbols.names[symbol]: f"rt.Symbol({quote(found.meaning)}, {range_text(found)}default={found.hint})"
        for symbol, found in known.items()
    }
    values = {name: _passed(value(node), symbols) for stage in stages for name, node in zip(stage.results, stage.outputs(), strict=False)}
    tied = {alias: quote(name) for stage in stages for alias, name in tied_names(stage).items()}
    assumed = dict.fromkeys(symbols.text(relation) for stage in stages for relation in stage.assumptions)
    yield "PLAN = rt.PipelineInfo("
    yield f"    mesh={mapping({'ranks': str(plan.devices)})},"
    yield from _entries("symbols", sizes)
    yield from _entries("inputs", _inputs(stages, symbols))
    yield from _entries("values", values)
    yield "    stages=("
    for index, stage in enumerate(stages):
        yield from indent(_stage(stage, plan, index), 2)
    yield "    ),"
    yield "    schedule=SCHEDULE,"
    yield f"    micro_batches={plan.micro_batches},"
    if plan.precision != Precision():
        yield f"    precision={precision_text(plan.precision)},"
    if assumed:
        yield from indent(wrapped(f"assumptions={sequence(map(quote, assumed))},", _WIDTH))
    if tied:
        yield from indent(wrapped(f"tied={mapping(tied)},", _WIDTH))
    if any(constants_of(stage) for stage in stages):
        yield f"    constants={quote(CONSTANTS)},"
    yield ")"


def _entries(name: str, entries: Mapping[str, str]) -> Iterator[str]:
    if entries:
        yield f"    {name}={{"
        for key, text in entries.items():
            yield from indent(wrapped(f"{quote(key)}: {text},", _WIDTH), 2)
        yield "    },"


def _inputs(stages: Sequence[Program], symbols: Symbols) -> dict[str, str]:
    """The batch's tensors; synthetic integers are below the smallest bound of all stages."""
    nodes: dict[str, list[tuple[Program, fx.Node]]] = {}
    for stage in stages:
        for node in stage.inputs():
            if info(node).role != RECEIVED:
                nodes.setdefault(str(node.target), []).append((stage, node))
    found = {}
    for name, uses in nodes.items():
        _, node = uses[0]
        given = [_shape(value(node), symbols), str(value(node).dtype)]
        bounds = [bound for stage, use in uses if is_integer(use) and (bound := upper_bound(stage, use)) is not None]
        given += [f"high={min(bounds)}"] if bounds else []
        found[name] = f"rt.Input({', '.join(given)})"
    return found


def _shape(found: Value, symbols: Symbols) -> str:
    return sequence(str(int(size)) if size.is_Integer else quote(symbols.text(size)) for size in found.shape)


def _passed(found: Value, symbols: Symbols) -> str:
    given = [_shape(found, symbols), str(found.dtype)]
    return f"rt.Passed({', '.join(given + ([] if found.requires_grad else ['gradient=False']))})"


def _stage(stage: Program, plan: Plan, index: int) -> Iterator[str]:
    names = parameter_names(stage)
    inputs = {names[n]: _placed(value(n), shards_only=True) for n in stage.inputs() if info(n).role != RECEIVED}
    receives = {names[n]: f"({quote(str(n.target))}, {_placed(value(n))})" for n in stage.inputs() if info(n).role == RECEIVED}
    results = {name: _placed(value(node)) for name, node in zip(stage.results, stage.outputs(), strict=False)}
    strategy = plan.strategies[index]
    fields = [str(plan.stages[index].first_rank), mapping({axis: str(size) for axis, size in stage.mesh.items()})]
    fields += [f"inputs={mapping(inputs)}"] if inputs else []
    fields += [f"receives={mapping(receives)}"] if receives else []
    fields += [f"results={mapping(results)}"] if results else []
    fields += [f"zero={strategy.zero}"] if strategy.zero else []
    data = data_axes(stage.state, stage.mesh)
    fields += [f"data_axes={sequence(map(quote, data))}"] if data else []
    *lines, last = wrapped(f"rt.Stage({', '.join(fields)})", _WIDTH - 8)
    yield from [*lines, f"{last},"]


def _placed(found: Value, shards_only: bool = False) -> str:
    """Placements that say more than ``I``."""

    def shown(placement: Placement) -> bool:
        return isinstance(placement, Shard) or (not shards_only and str(placement) != "I")

    return mapping({axis: quote(str(placement)) for axis, placement in found.placements if shown(placement)})

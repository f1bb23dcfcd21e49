"""Run torch.export on the copy and turn what it returns into one flat graph in the program's own terms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor, fx, nn
from torch.export import Dim, ExportedProgram

from hgc._torch_compat import exporting_in, size_guards
from hgc.errors import TraceError
from hgc.ir.program import State, SymbolInfo
from hgc.ir.value import Info, Value, set_info
from hgc.tracing.assumptions import find_assumptions
from hgc.tracing.calling import Caller
from hgc.tracing.copying import ModelCopy
from hgc.tracing.dims import Dims, meaning
from hgc.tracing.failures import explained
from hgc.tracing.normalise.cleanup import drop_assertions
from hgc.tracing.normalise.inline import inline_regions
from hgc.tracing.symbols import Renaming, raw, symbol

Loss = Callable[[Any, dict[str, Any]], Tensor]


@dataclass
class Flat:
    """The whole model as one graph of operators.

    Placeholders are the inputs and the state; ``inputs`` and ``holders`` map them to input and state names. Every node has an
    ``Info``, and size arguments are sympy expressions (no node computes a size), which the split into blocks turns into nodes of
    each body. ``pinned`` are the names of dims that became numbers.
    """

    graph: fx.Graph
    inputs: dict[fx.Node, str]
    holders: dict[fx.Node, str]
    state: dict[str, State]
    symbols: dict[sympy.Symbol, SymbolInfo]
    assumptions: tuple[sympy.Basic, ...]
    pinned: dict[str, int]
    report: list[str]


class Entry(nn.Module):
    """The model and its loss behind one argument; equal names of dims are declared equal before anything else runs."""

    def __init__(self, model: nn.Module, caller: Caller, dims: Dims) -> None:
        super().__init__()
        self.model = model
        self.caller = caller
        self.dims = dims

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        first: dict[str, Any] = {}
        for name, dims in self.dims.names.items():
            for dim, symbol_name in dims.items():
                size = batch[name].shape[dim]
                torch._check(size == first.setdefault(symbol_name, size))  # type: ignore[no-untyped-call]
        return self.caller(self.model, batch)


def capture(copied: ModelCopy, inputs: Mapping[str, Tensor], caller: Caller, dims: Dims) -> Flat:
    """Export the copy; raises ``TraceError`` with the operation, the source line and a remedy if that fails."""
    # Real tensors, never read: export gives symbolic sizes to real inputs only.
    batch = {name: torch.empty(dims.shape(name, x), dtype=x.dtype, device="cpu") for name, x in inputs.items()}
    dynamic = {name: dict.fromkeys(dims.names.get(name, {}), Dim.AUTO) for name in inputs}
    with explained(), exporting_in(copied.fake_mode):
        exported = torch.export.export(Entry(copied.model, caller, dims), (batch,), dynamic_shapes=(dynamic,), strict=False)
    return _flatten(exported, copied, list(inputs), dims)


def _flatten(exported: ExportedProgram, copied: ModelCopy, input_names: list[str], dims: Dims) -> Flat:
    inline_regions(exported.graph_module)
    graph = exported.graph_module.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    user = iter(input_names)
    inputs: dict[fx.Node, str] = {}
    holders: dict[fx.Node, str] = {}
    state = dict(copied.state)
    canonical = {alias: name for name, entry in state.items() for alias in (name, *entry.aliases)}
    for spec in exported.graph_signature.input_specs:
        node = placeholders[spec.arg.name]
        kind = spec.kind.name
        if kind == "USER_INPUT":
            inputs[node] = next(user)
        elif kind in ("PARAMETER", "BUFFER"):
            holders[node] = canonical[str(spec.target).removeprefix("model.")]
        else:
            constant = exported.constants[str(spec.target)]
            assert isinstance(constant, Tensor)
            holders[node] = _add_constant(state, str(spec.target).removeprefix("model."), constant)
    drop_assertions(graph)
    named = _name_symbols(inputs, dims, exported.range_constraints)
    _attach_infos(graph, named.renaming)
    _sizes_to_expressions(graph, named.renaming)
    _merge_ties(graph, holders)
    assumptions = find_assumptions(size_guards(copied.fake_mode), named.renaming, named.symbols)
    report = [*named.report, *(f"Tracing assumed that {relation}." for relation in assumptions)]
    return Flat(graph, inputs, holders, state, named.symbols, assumptions, named.pinned, report)


def _add_constant(state: dict[str, State], name: str, tensor: Tensor) -> str:
    while name in state:
        name += "_"
    value = Value(tuple(sympy.Integer(size) for size in tensor.shape), tensor.dtype)
    state[name] = State(name, value, "constant", (), False, tensor.detach().clone())
    return name


@dataclass
class _Named:
    """The program's symbols, found in the shapes that the inputs have after tracing."""

    renaming: Renaming
    symbols: dict[sympy.Symbol, SymbolInfo]
    pinned: dict[str, int]
    report: list[str]


def _name_symbols(inputs: Mapping[fx.Node, str], dims: Dims, ranges: Mapping[Any, Any]) -> _Named:
    named = _Named(Renaming({}), {}, {}, [])
    for node, name in inputs.items():
        for dim, label in dims.names.get(name, {}).items():
            expr = raw(node.meta["val"].shape[dim])
            if not expr.free_symbols:
                named.pinned[label] = int(expr)
            elif symbol(label) not in named.symbols:
                _name_symbol(named, expr, label, dims, ranges)
            elif expr.is_Symbol:
                named.renaming.symbols.setdefault(expr, symbol(label))
    return named


def _name_symbol(named: _Named, expr: sympy.Expr, label: str, dims: Dims, ranges: Mapping[Any, Any]) -> None:
    """``expr`` is the tracer's symbol, or a multiple of it where the model needs the size to divide."""
    own, what = symbol(label), meaning(label, dims.names)
    (inner,) = expr.free_symbols
    named.renaming.symbols[inner] = own if expr.is_Symbol else sympy.solve(expr - own, inner)[0]
    if not expr.is_Symbol:
        named.report.append(f"The {what} size ({label}) must be {expr} for an integer {inner}.")
    low, high = _range(ranges.get(expr))
    named.symbols[own] = SymbolInfo(what, low, high, dims.hints[label])


def _range(found: Any) -> tuple[int, int | None]:
    """Tracing assumes at least 2 where nothing else is known; that only keeps size 1 from being special, so 1 is legal too."""
    if found is None:
        return 1, None
    low, high = found.lower, found.upper
    return (int(low) if low.is_Integer and low > 2 else 1), (int(high) if high.is_Integer else None)


def _attach_infos(graph: fx.Graph, renaming: Renaming) -> None:
    for node in graph.nodes:
        if node.op == "output":
            continue
        path = _module_path(node)
        set_info(node, Info(value=_value(node.meta.get("val"), renaming), path=path, source=_source(node)))


def _value(found: Any, renaming: Renaming) -> Value | tuple[Value, ...] | None:
    if isinstance(found, Tensor):
        return Value(tuple(renaming.size(size) for size in found.shape), found.dtype)
    if isinstance(found, list | tuple) and all(isinstance(x, Tensor) for x in found):
        return tuple(Value(tuple(renaming.size(size) for size in x.shape), x.dtype) for x in found)
    return None


def _module_path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    if not stack:
        return ""
    path = str(next(reversed(stack.values()))[0])
    return "" if path.startswith("_empty_nn") else path.partition("@")[0].removeprefix("model").removeprefix(".")


def _source(node: fx.Node) -> str:
    """``file:line`` of the innermost frame outside torch."""
    for line in reversed((node.meta.get("stack_trace") or "").splitlines()):
        if line.startswith('  File "') and "/torch/" not in line:
            file, _, rest = line.removeprefix('  File "').partition('"')
            return f"{file.rpartition('/')[2]}:{rest.partition('line ')[2].partition(',')[0]}"
    return ""


def _sizes_to_expressions(graph: fx.Graph, renaming: Renaming) -> None:
    """Put sympy expressions in place of the nodes that compute sizes, and drop those nodes."""

    def expression(node: fx.Node) -> Any:
        found = node.meta.get("val")
        if isinstance(found, torch.SymInt | torch.SymFloat):
            expr = renaming(found.node.expr)
            return int(expr) if expr.is_Integer else expr
        return found if isinstance(found, int | float | bool) else node

    for node in graph.nodes:
        node.args = fx.map_arg(node.args, expression)
        node.kwargs = fx.map_arg(node.kwargs, expression)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and isinstance(
            node.meta.get("val"), torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
        ):
            graph.erase_node(node)


def _merge_ties(graph: fx.Graph, holders: dict[fx.Node, str]) -> None:
    """Tied tensors have one placeholder each name; keep one for each tensor."""
    first: dict[str, fx.Node] = {}
    for node, name in list(holders.items()):
        kept = first.setdefault(name, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            del holders[node]


def output_of(graph: fx.Graph) -> fx.Node:
    """The node that computes the loss; ``TraceError`` if the model returns something else than one scalar."""
    (output,) = (n for n in graph.nodes if n.op == "output")
    loss = output.args[0][0] if isinstance(output.args[0], list | tuple) else output.args[0]
    if not isinstance(loss, fx.Node):
        raise TraceError("The loss does not depend on the model's inputs or weights; pass loss= a function of the model's output.")
    return loss

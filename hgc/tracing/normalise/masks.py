"""Masks that depend on sizes only: evaluate them, and say "causal" where that is what they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hgc.ir.input_sizes import evaluate
from hgc.ir.ops.attention import attention
from hgc.ir.program import State, SymbolInfo
from hgc.tracing.normalise.edit import base, tensor

_LARGEST = 2**24  # elements of a mask worth evaluating while tracing
_MASKED = -1e4  # scores at or below count as masked
_BIAS, _CAUSAL = 3, 5  # positions among the arguments of attention
_RANDOM = ("rand", "dropout", "bernoulli", "normal", "uniform", "multinomial", "exponential")


def causal_masks(
    graph: fx.Graph, holders: Mapping[fx.Node, str], states: Mapping[str, State], symbols: Mapping[sympy.Symbol, SymbolInfo]
) -> None:
    """Replace the bias of every attention that holds a lower triangle, or nothing, whatever the sizes, by the attribute ``causal``."""
    constants = {node: states[name].data for node, name in holders.items() if states[name].data is not None}
    kinds: dict[fx.Node, str] = {}
    for node in graph.nodes:
        bias = node.args[_BIAS] if node.target is attention else None
        if not isinstance(bias, fx.Node):
            continue
        if bias not in kinds:
            kinds[bias] = _kind(bias, constants, symbols)
        if kinds[bias] in ("causal", "none"):
            args = list(node.args)
            args[_BIAS], args[_CAUSAL] = None, args[_CAUSAL] or kinds[bias] == "causal"
            node.args = tuple(args)


def _kind(bias: fx.Node, constants: Mapping[fx.Node, Tensor | None], symbols: Mapping[sympy.Symbol, SymbolInfo]) -> str:
    """``"causal"``, ``"none"`` or ``""``, the same for all sizes tried."""
    if not _is_constant(bias, constants):
        return ""
    value = tensor(bias)
    assert value is not None
    found = set()
    for sizes in _sizes_to_try(value.shape, symbols):
        if evaluate(value.numel, sizes) > _LARGEST:
            return ""
        try:
            mask = _Evaluation(constants, sizes)(bias)
        except (RuntimeError, TypeError, KeyError, IndexError):  # not defined for these sizes, or not on plain tensors
            return ""
        found.add(_describe(mask))
    return found.pop() if len(found) == 1 else ""


def _is_constant(node: fx.Node, constants: Mapping[fx.Node, Any]) -> bool:
    """True if the value depends on sizes and known constants only."""
    seen: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if current in constants:
            continue
        if current.op != "call_function" or any(word in base(current) for word in _RANDOM):
            return False
        new = [x for x in current.all_input_nodes if x not in seen]
        seen.update(new)
        waiting += new
    return True


def _sizes_to_try(shape: Iterable[sympy.Expr], symbols: Mapping[sympy.Symbol, SymbolInfo]) -> list[dict[sympy.Symbol, int]]:
    """Three assignments of small sizes within the legal ranges, all different from one another."""
    result = []
    for number in range(3):
        sizes = {}
        for offset, (symbol, found) in enumerate(symbols.items()):
            size = max(found.low, 2) + 3 * number + offset
            sizes[symbol] = size if found.high is None else min(size, found.high)
        result.append(sizes)
    return result if any(size.free_symbols for size in shape) else result[:1]


class _Evaluation:
    """Computes the value of a node for given sizes."""

    def __init__(self, constants: Mapping[fx.Node, Tensor | None], sizes: Mapping[sympy.Symbol, int]) -> None:
        self.sizes = sizes
        self.values: dict[fx.Node, Any] = dict(constants)

    def __call__(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument not in self.values:
                kwargs = {name: self(x) for name, x in argument.kwargs.items()}
                assert callable(argument.target)
                self.values[argument] = argument.target(*(self(x) for x in argument.args), **kwargs)
            return self.values[argument]
        if isinstance(argument, sympy.Expr):
            return evaluate(argument, self.sizes)
        if isinstance(argument, list | tuple):
            return [self(x) for x in argument]
        return argument


def _describe(mask: Tensor) -> str:
    rows, columns = mask.shape[-2:] if mask.dim() >= 2 else (1, 1)
    if mask.is_floating_point():
        if bool(((mask != 0) & (mask > _MASKED)).any()):
            return ""
        mask = mask == 0
    if mask.dtype != torch.bool:
        return ""
    if bool(mask.all()):
        return "none"
    if rows > 1 and bool((mask == torch.ones(rows, columns, dtype=torch.bool).tril()).all()):
        return "causal"
    return ""

"""Short texts about nodes: operator names, path ranges, counts."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from hgc.ir import ops
from hgc.ir.value import Info, Value

MOVES_FORWARD = frozenset([ops.all_reduce, ops.all_reduce_r, ops.all_gather, ops.all_gather_i, ops.reduce_scatter, ops.all_to_all])
MOVES_BACKWARD = frozenset([ops.copy_in, ops.as_invariant, ops.shard, ops.shard_r])


def is_collective(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in MOVES_FORWARD | MOVES_BACKWARD


def operator_name(node: fx.Node) -> str:
    """``linear`` for ``aten.linear.default``, ``to`` for ``aten.to.dtype``."""
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target.overloadpacket.__name__)
    return getattr(node.target, "__name__", str(node.target))


def attributes(node: fx.Node) -> list[str]:
    """The arguments of an hgc operator that are not tensors and not at their default: ``["causal", "window=4096"]``."""
    if isinstance(node.target, torch._ops.OpOverload) or node.op != "call_function":
        return []
    try:
        signature = inspect.signature(node.target)  # type: ignore[arg-type]
        given = signature.bind(*node.args, **node.kwargs).arguments
    except (TypeError, ValueError):
        return []
    shown = []
    for name, value in given.items():
        if _is_plain(value) and value != signature.parameters[name].default and value not in (None, False, 0, 0.0, ()):
            text = f"{value:.4g}" if isinstance(value, float) else str(value)
            shown.append(name if value is True else f"{name}={text}")
    return shown


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def collective_words(node: fx.Node) -> str:
    """``tp, dim 1``: the axis first, then what else the call says."""
    given = inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments  # type: ignore[arg-type]
    words = [str(given["axis"])] + [f"{name} {given[name]}" for name in ("dim", "src", "dst") if name in given]
    return ", ".join(words)


def axis_of(node: fx.Node) -> str:
    return str(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments["axis"])  # type: ignore[arg-type]


def first_value(info: Info) -> Value | None:
    """The value of a node, or the first of several."""
    return info.value[0] if isinstance(info.value, tuple) and info.value else info.value if isinstance(info.value, Value) else None


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def path_range(paths: Sequence[str]) -> str:
    """``model.layers.0-79`` for the paths of 80 layers; the first path and a count if they differ in more than one number."""
    split = [path.split(".") for path in paths]
    if len(set(paths)) == 1:
        return paths[0]
    if len({len(parts) for parts in split}) == 1:
        differing = [place for place in range(len(split[0])) if len({parts[place] for parts in split}) > 1]
        if len(differing) == 1 and all(parts[differing[0]].isdigit() for parts in split):
            place = differing[0]
            return ".".join([*split[0][:place], _ranges([int(parts[place]) for parts in split]), *split[0][place + 1 :]])
    return f"{paths[0]} and {len(paths) - 1} more"


def _ranges(numbers: list[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][-1] == number - 1:
            runs[-1][-1:] = [number] if len(runs[-1]) > 1 else [runs[-1][0], number]
        else:
            runs.append([number])
    words = ["-".join(map(str, run)) for run in runs]
    return ",".join(words) if len(words) <= 4 else f"{words[0]},{words[1]},...,{words[-1]}"


def quantity(number: float) -> str:
    """``855M``, ``1.24B``."""
    for unit, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.3g}{unit}"
    return f"{number:.0f}"

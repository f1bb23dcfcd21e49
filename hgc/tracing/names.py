"""Names that a person would choose, always identifiers, never twice."""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Iterable

import torch
from torch import fx

from hgc.ir.value import Value, info
from hgc.tracing.normalise.edit import base

_GENERIC = frozenset({"hidden_states", "hidden_state", "input", "inputs", "src", "tgt", "args", "tensor", "inputs_embeds"})
_WEIGHTY = frozenset({"aten::linear", "aten::embedding", "aten::layer_norm", "aten::conv1d", "aten::conv2d", "aten::conv3d"})


class Namer:
    """Hands out each name once: ``x``, ``x2``, ``x3``."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)

    def __call__(self, wanted: str) -> str:
        name = identifier(wanted)
        number = 2
        while name in self._taken:
            name = f"{identifier(wanted)}{number}"
            number += 1
        self._taken.add(name)
        return name


def identifier(text: str) -> str:
    """The nearest Python identifier."""
    name = re.sub(r"\W", "_", text, flags=re.ASCII)
    if not name or name[0].isdigit():
        name = f"_{name}"
    return f"{name}_" if keyword.iskeyword(name) or name in ("self", "torch", "device") else name


def class_name(text: str) -> str:
    """``final_layer_norm`` -> ``FinalLayerNorm``."""
    return identifier("".join(part[:1].upper() + part[1:] for part in re.split(r"[^0-9a-zA-Z]+", text)) or "Part")


def activation_name(node: fx.Node, argument: str = "") -> str:
    """What to call a value that enters a block, given the parameter it was passed as, if any."""
    trigonometric = _trigonometric(node)
    if trigonometric:
        return trigonometric
    value = info(node).value
    if isinstance(value, Value) and value.dtype == torch.bool and len(value.shape) == 4:
        return "mask"
    return argument if argument and argument not in _GENERIC else "x"


def _trigonometric(node: fx.Node) -> str:
    """``cos`` or ``sin`` for a rotary table, through the casts and scalings behind it."""
    for _ in range(5):
        name = base(node)
        if name in ("aten::cos", "aten::sin"):
            return name.removeprefix("aten::")
        if len(node.all_input_nodes) != 1:
            return ""
        (node,) = node.all_input_nodes
    return ""


def operator_name(node: fx.Node) -> str:
    """The last part of the module path for layers that hold weights, else the operator."""
    if node.target is operator.getitem:
        source, index = node.args
        assert isinstance(source, fx.Node)
        return f"{operator_name(source)}_{index}"
    leaf = info(node).path.rpartition(".")[2]
    if base(node) in _WEIGHTY and leaf and not leaf.isdigit():
        return identifier(leaf)
    if base(node):
        return identifier(base(node).rpartition("::")[2].strip("_"))
    return identifier(getattr(node.target, "__name__", node.name))

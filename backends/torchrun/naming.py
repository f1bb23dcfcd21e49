"""What a person would call a value: after the module that computes it, the value it is a form of, or what it is."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from hgc.backends.torchrun.names import words
from hgc.ir.printing import is_collective, operator_label
from hgc.ir.value import Value, info, is_size

NAMED_BY_MODULE = words(
    """
    linear embedding vocab_embedding layer_norm rms_norm group_norm batch_norm conv1d conv2d conv3d conv_transpose2d grouped_linear
    """
)
_FORMS = words(
    """
    reshape view transpose permute expand unsqueeze squeeze flatten contiguous clone detach slice select to type_as
    repeat_interleave roll flip t dropout neg abs relu relu6 gelu silu tanh sigmoid elu selu mish hardswish leaky_relu softplus exp
    log sqrt square clamp clamp_min clamp_max masked_fill pad constant_pad_nd index index_select gather tril triu movedim unflatten
    swapaxes glu max_pool1d max_pool2d avg_pool2d adaptive_avg_pool2d mean sum cumsum split chunk unbind split_with_sizes getitem
    repeat tile copy_in masked_scatter index_put slice_scatter normal cat stack numpy_T
    """
)
"""Operators whose result is another form of their first operand and keeps its name."""

_ARITHMETIC = words("add sub mul div where rsub maximum minimum lerp addcmul pow matmul bmm remainder min max")
LOSSES = words("cross_entropy cross_entropy_loss nll_loss_nd binary_cross_entropy_with_logits")
_UNNAMED_MODULES = words("dropout gelu silu relu tanh sigmoid split chunk")
"""Modules of one such operator say nothing that the operator does not."""

_OWN = {
    "arange": "positions",
    "softmax": "weights",
    "cross_entropy": "loss",
    "cross_entropy_loss": "loss",
    "attention": "attn",
    "scaled_dot_product_attention": "attn",
    "rsqrt": "inv",
    "argmax": "best",
    "eq": "mask",
    "ne": "mask",
    "lt": "mask",
    "le": "mask",
    "gt": "mask",
    "ge": "mask",
    "bitwise_and": "mask",
    "bitwise_or": "mask",
    "logical_and": "mask",
    "logical_or": "mask",
    "logical_not": "mask",
    "bitwise_not": "mask",
    "moe_dispatch": "rows",
    "moe_combine": "combined",
}


def stem(node: fx.Node) -> str:
    """The operator's name without namespace and overload."""
    return operator_label(node)


_SEVERAL = {
    "moe_dispatch": ("rows", "offsets", "order"),
    "topk": ("top", "indices"),
    "sort": ("ordered", "indices"),
    "max": ("highest", "indices"),
    "min": ("lowest", "indices"),
}
"""Operators with several outputs that mean different things."""


class Names:
    """Base names of the values of one body; :class:`~hgc.backends.torchrun.names.Scope` makes them unique where they live."""

    def __init__(self, graph: fx.Graph) -> None:
        self._known: dict[fx.Node, str] = {}
        for node in graph.nodes:
            if stem(node) in ("attention", "scaled_dot_product_attention"):
                self._name_fused(node)

    def _name_fused(self, attention: fx.Node) -> None:
        """Queries, keys and values that one module computes together are ``q``, ``k`` and ``v``."""
        chains = [_chain(x) for x in attention.all_input_nodes[:3]]
        sources = [chain[-1] for chain in chains]
        if len(chains) == 3 and sources[0] is sources[1] is sources[2]:
            for chain, name in zip(chains, "qkv", strict=True):
                self._known.update(dict.fromkeys(chain[:-1], name))

    def __call__(self, node: fx.Node) -> str:
        if node not in self._known:
            self._known[node] = node.name if node.op == "placeholder" and info(node).role == "input" else self._choose(node)
        return self._known[node]

    def _choose(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return last_part(info(node).path)
        kind = stem(node)
        if kind == "getitem":
            source, index = node.all_input_nodes[0], int(str(node.args[1]))
            if stem(source) in _SEVERAL:
                return _SEVERAL[stem(source)][index]
            if stem(source) == "broadcast_tensors":
                return self(source.all_input_nodes[index])
        if kind in ("cos", "sin"):
            return kind
        users = [user for user in node.users if user.op == "call_function"]
        if users and all(stem(user) in ("cos", "sin") for user in users):
            return "angles"
        if kind in _OWN:
            return _OWN[kind]
        if any(stem(user) in LOSSES and user.args[0] is node for user in users):
            return last_part(info(node).path) if kind in NAMED_BY_MODULE and info(node).path else "logits"
        if kind in NAMED_BY_MODULE:
            return last_part(info(node).path) or kind
        if kind == "mean" and _is_square(operands_of(node)[0]):
            return "var"
        if kind == "add" and _stream(node):
            return self(_stream(node)[0])
        if leaves_module(node) and kind not in _UNNAMED_MODULES:
            return last_part(info(node).path)
        primary = primary_operand(node)
        if primary is None:
            return kind
        return "h" if _joins_branches(node) else self(primary)


def primary_operand(node: fx.Node) -> fx.Node | None:
    """The operand that a value is a form of: for sums and products the one of the result's shape, the residual stream before others."""
    operands = operands_of(node)
    if not operands or (not is_collective(node) and stem(node) not in _FORMS | _ARITHMETIC):
        return None
    if stem(node) not in _ARITHMETIC:
        return operands[0]
    numbers = [x for x in operands if not _is_bool(x)] or operands
    same = [x for x in numbers if _shape(x) == _shape(node) and not _is_state(x)]
    return (_stream(node) or same or [x for x in numbers if not _is_state(x)] or numbers)[0]


def _chain(node: fx.Node) -> list[fx.Node]:
    """A value, what it is a form of, and so on, up to what several values are forms of."""
    chain = [node]
    while (before := primary_operand(node)) is not None:
        chain.append(before)
        node = before
        if before.op == "placeholder" or isinstance(info(before).value, tuple) or stem(before) in NAMED_BY_MODULE:
            break
    return chain


def _stream(node: fx.Node) -> list[fx.Node]:
    """Operands that the residual stream comes in with."""
    return [x for x in operands_of(node) if _shape(x) == _shape(node) and _comes_from_input(x)]


def _joins_branches(node: fx.Node) -> bool:
    """A product of two values of one shape, neither of which is the residual stream: a gate."""
    operands = [x for x in operands_of(node) if _shape(x) == _shape(node) and not _is_state(x)]
    return stem(node) == "mul" and len(operands) == 2 and not _stream(node) and not _is_square(operands[0])


def _is_bool(node: fx.Node) -> bool:
    value = info(node).value
    return isinstance(value, Value) and value.dtype == torch.bool


def last_part(path: str) -> str:
    """``mlp.0.weight`` -> ``weight``, ``mlp.0`` -> ``mlp_0``, ``output.LayerNorm`` -> ``layer_norm``: the last part that says something."""
    *before, leaf = path.split(".")
    if leaf == "self" and before:
        return snake(before[-1])
    return snake(f"{before[-1]}_{leaf}" if leaf.isdigit() and before else leaf)


def snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def operands_of(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if not is_size(x)]


def _shape(node: fx.Node) -> Any:
    value = info(node).value
    return value.shape if isinstance(value, Value) else None


def _is_state(node: fx.Node) -> bool:
    while is_collective(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and info(node).role != "input"


def _is_square(node: fx.Node) -> bool:
    return stem(node) == "square" or (stem(node) == "pow" and isinstance(node.args[1], int | float) and node.args[1] == 2)


def _comes_from_input(node: fx.Node) -> bool:
    """Is it an input of the block, or a sum along the residual stream that starts there?"""
    for _ in range(200):
        if node.op == "placeholder":
            return info(node).role == "input"
        if is_collective(node) or stem(node) in ("add", "to", "dropout"):
            node = operands_of(node)[0]
        else:
            return False
    return False


def leaves_module(node: fx.Node) -> bool:
    """Is this the value that its module returns? Then nothing in the module uses it any more."""
    path = info(node).path
    if not path or not isinstance(info(node).value, Value):
        return False
    users = list(node.users)
    while users:
        user = users.pop()
        if user.op == "output":
            continue
        if is_collective(user):
            users.extend(user.users)
        elif (info(user).path + ".").startswith(path + "."):
            return False
    return True

"""What a person would call a value: after the module that computes it, the value it is a form of, or what it is."""

from __future__ import annotations

from typing import Any

from torch import fx

from hgc.ir.printing import is_collective, operator_label
from hgc.ir.value import Value, info, is_size

NAMED_BY_MODULE = frozenset(
    "linear embedding vocab_embedding layer_norm rms_norm group_norm batch_norm conv1d conv2d conv3d conv_transpose2d grouped_linear".split()
)
_FORMS = frozenset(
    """reshape view transpose permute expand unsqueeze squeeze flatten contiguous clone detach slice select to type_as repeat_interleave roll flip t dropout
    neg abs relu relu6 gelu silu tanh sigmoid elu selu mish hardswish leaky_relu softplus exp log sqrt square clamp clamp_min clamp_max masked_fill
    pad constant_pad_nd index index_select gather tril triu movedim unflatten swapaxes glu max_pool1d max_pool2d avg_pool2d adaptive_avg_pool2d
    mean sum cumsum split chunk unbind split_with_sizes getitem repeat tile copy_in masked_scatter index_put slice_scatter normal cat stack""".split()
)
"""Operators whose result is another form of their first operand and keeps its name."""

_ARITHMETIC = frozenset("add sub mul div where rsub maximum minimum lerp addcmul pow matmul bmm remainder".split())
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


class Names:
    """Base names of the values of one body; :class:`~hgc.backends.torchrun.names.Scope` makes them unique where they live."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, str] = {}

    def __call__(self, node: fx.Node) -> str:
        if node not in self._known:
            self._known[node] = node.name if node.op == "placeholder" and info(node).role == "input" else self._choose(node)
        return self._known[node]

    def _choose(self, node: fx.Node) -> str:
        if node.op == "placeholder":
            return last_part(info(node).path)
        kind = stem(node)
        if kind in ("cos", "sin"):
            return kind
        users = [user for user in node.users if user.op == "call_function"]
        if users and all(stem(user) in ("cos", "sin") for user in users):
            return "angles"
        if kind in _OWN:
            return _OWN[kind]
        if kind in NAMED_BY_MODULE:
            return last_part(info(node).path) or kind
        if kind == "mean" and _is_square(_operands(node)[0]):
            return "var"
        if leaves_module(node):
            return last_part(info(node).path)
        operands = _operands(node)
        if operands and (is_collective(node) or kind in _FORMS):
            return self(operands[0])
        if operands and kind in _ARITHMETIC:
            return self._arithmetic(node, operands)
        return kind

    def _arithmetic(self, node: fx.Node, operands: list[fx.Node]) -> str:
        """The operand of the result's shape; an input of the block (the residual stream) before others; ``h`` for a product of two branches."""
        same = [x for x in operands if _shape(x) == _shape(node) and not _is_state(x)]
        stream = [x for x in same if _comes_from_input(x)]
        if stream:
            return self(stream[0])
        if len(same) == 2 and stem(node) == "mul" and not (_is_square(same[0]) or same[0] is same[1]):
            return "h"
        chosen = same or [x for x in operands if not _is_state(x)] or operands
        return self(chosen[0])


def last_part(path: str) -> str:
    """``mlp.0.weight`` -> ``weight``, ``mlp.0`` -> ``mlp_0``: the last part that says something."""
    *before, leaf = path.split(".")
    return f"{before[-1]}_{leaf}" if leaf.isdigit() and before else leaf


def _operands(node: fx.Node) -> list[fx.Node]:
    return [x for x in node.all_input_nodes if not is_size(x)]


def _shape(node: fx.Node) -> Any:
    value = info(node).value
    return value.shape if isinstance(value, Value) else None


def _is_state(node: fx.Node) -> bool:
    while is_collective(node):
        node = node.all_input_nodes[0]
    return node.op == "placeholder" and info(node).role != "input"


def _is_square(node: fx.Node) -> bool:
    return stem(node) in ("pow", "square") and (stem(node) == "square" or node.args[1] == 2)


def _comes_from_input(node: fx.Node) -> bool:
    """Is it an input of the block, or a sum along the residual stream that starts there?"""
    for _ in range(200):
        if node.op == "placeholder":
            return info(node).role == "input"
        if is_collective(node) or stem(node) in ("add", "to", "dropout"):
            node = _operands(node)[0]
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

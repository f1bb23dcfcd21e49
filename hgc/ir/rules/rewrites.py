"""Rewrites of ATen operators into the sharded operators of ``hgc.ir.ops``, used by rules whose case needs another operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hgc.ir import ops
from hgc.ir.ops.reductions import mean
from hgc.ir.rules.core import named_arguments

_REDUCTIONS = ("none", "mean", "sum")


def _become(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    node.target = target
    node.args, node.kwargs = args, kwargs
    return node


def to_mean(node: fx.Node, axis: str, size: int) -> fx.Node:
    """``aten.mean`` over a sharded dim -> ``ops.mean(..., batch_axes=(axis,))``."""
    given = named_arguments(node)
    kwargs = {"dtype": given["dtype"]} if given.get("dtype") is not None else {}
    args = (given["self"], given.get("dim"), bool(given.get("keepdim")))
    return _become(node, mean, args, {**kwargs, "batch_axes": (axis,)})


def to_batch_norm(node: fx.Node, axis: str, size: int) -> fx.Node:
    given = named_arguments(node)
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    return _become(node, ops.batch_norm, tuple(given[name] for name in names), {"batch_axes": (axis,)})


def to_vocab_embedding(node: fx.Node, axis: str, size: int) -> fx.Node:
    given = named_arguments(node)
    return _become(node, ops.vocab_embedding, (given["weight"], given["indices"], axis), {"padding_idx": given["padding_idx"]})


def as_hgc_cross_entropy(node: fx.Node) -> None:
    """``aten.cross_entropy_loss`` -> ``ops.cross_entropy``, same meaning."""
    if node.target is not torch.ops.aten.cross_entropy_loss.default:
        return
    given = named_arguments(node)
    kwargs: dict[str, Any] = {}
    if given["weight"] is not None:
        kwargs["weight"] = given["weight"]
    if given["reduction"] != 1:
        kwargs["reduction"] = _REDUCTIONS[given["reduction"]]
    if given["ignore_index"] != -100:
        kwargs["ignore_index"] = given["ignore_index"]
    if given["label_smoothing"]:
        kwargs["label_smoothing"] = given["label_smoothing"]
    _become(node, ops.cross_entropy, (given["self"], given["target"]), kwargs)


def cross_entropy_rows(node: fx.Node, axis: str, size: int) -> fx.Node:
    """Rows sharded: every rank returns its part of the loss."""
    as_hgc_cross_entropy(node)
    node.update_kwarg("batch_axes", (*node.kwargs.get("batch_axes", ()), axis))  # type: ignore[misc]
    return node


def cross_entropy_classes(node: fx.Node, axis: str, size: int) -> fx.Node:
    """Classes sharded: three small all-reduces instead of gathered logits."""
    as_hgc_cross_entropy(node)
    node.update_kwarg("vocab_axis", axis)
    return node

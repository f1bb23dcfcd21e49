"""One operator for each computation: ``reshape``, ``linear``, ``to.dtype``, ``hgc`` dropout, batch norm and attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from hgc.ir.ops.norms import batch_norm
from hgc.ir.ops.random import dropout
from hgc.ir.value import Value
from hgc.tracing.leaves import RUNTIME
from hgc.tracing.normalise.edit import argument, aten, base, drop, insert, retarget, sizes_of, tensor


def canonical_operators(graph: fx.Graph) -> None:
    """Rewrite every node in its one spelling. The graph must be functional."""
    for node in list(graph.nodes):
        if node.op == "call_function":
            node.target = RUNTIME.get(node.target, node.target)
            _without_device(node)
            if (rewrite := _REWRITES.get(base(node))) is not None:
                rewrite(node)


def _without_device(node: fx.Node) -> None:
    """Tensors are created on the device that runs the program, whatever the tracing device was."""
    kwargs = {name: x for name, x in node.kwargs.items() if name not in ("device", "layout", "pin_memory", "memory_format")}
    if len(kwargs) != len(node.kwargs):
        node.kwargs = kwargs


def _reshape(node: fx.Node) -> None:
    value = tensor(node)
    assert value is not None
    retarget(node, aten.reshape.default, (node.args[0], sizes_of(value.shape)))


def _view(node: fx.Node) -> None:
    if node.target is aten.view.dtype:
        return
    _reshape(node)


def _cast(node: fx.Node) -> None:
    value = tensor(node)
    assert value is not None
    retarget(node, aten.to.dtype, (node.args[0], value.dtype))


def _expand(node: fx.Node) -> None:
    """``expand_as`` and ``broadcast_to`` are ``expand``; sizes that stay are -1."""
    value, source = tensor(node), tensor(node.args[0])
    assert value is not None
    assert source is not None
    new_dims = len(value.shape) - len(source.shape)
    kept = [dim >= new_dims and source.shape[dim - new_dims] == size for dim, size in enumerate(value.shape)]
    sizes = [-1 if same else size for same, size in zip(kept, sizes_of(value.shape), strict=True)]
    retarget(node, aten.expand.default, (node.args[0], sizes))


def _addmm(node: fx.Node) -> None:
    bias, x, weight = node.args
    if argument(node, "beta") != 1 or argument(node, "alpha") != 1 or len(_value(bias).shape) != 1:
        return
    retarget(node, aten.linear.default, (x, _transposed(node, weight), bias))


def _transposed(before: fx.Node, weight: Any) -> fx.Node:
    value = _value(weight)
    return insert(before, aten.t.default, (weight,), Value(value.shape[::-1], value.dtype))


def _value(node: Any) -> Value:
    value = tensor(node)
    assert value is not None
    return value


def _dropout(node: fx.Node) -> None:
    source, p, train = (argument(node, name) for name in ("input", "p", "train"))
    if train and p:
        retarget(node, dropout, (source, p))
    else:
        drop(node, source)


def _batch_norm(node: fx.Node) -> None:
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    retarget(node, batch_norm, tuple(argument(node, name) for name in names))


def _new_like(overload: Any, *values: Any) -> Callable[[fx.Node], None]:
    """``new_zeros(x, size)`` and such read nothing of ``x`` but its type: name the type instead."""

    def rewrite(node: fx.Node) -> None:
        value = _value(node)
        fill = values or ((node.args[2],) if base(node) == "aten::new_full" else ())
        retarget(node, overload, (sizes_of(value.shape), *fill), {"dtype": value.dtype})

    return rewrite


_REWRITES: dict[str, Callable[[fx.Node], None]] = {
    "aten::view": _view,
    "aten::_unsafe_view": _reshape,
    "aten::reshape": _reshape,
    "aten::flatten": _reshape,
    "aten::unflatten": _reshape,
    "aten::view_as": _reshape,
    "aten::reshape_as": _reshape,
    "aten::to": _cast,
    "aten::_to_copy": _cast,
    "aten::type_as": _cast,
    "aten::expand": _expand,
    "aten::expand_as": _expand,
    "aten::broadcast_to": _expand,
    "aten::addmm": _addmm,
    "aten::dropout": _dropout,
    "aten::batch_norm": _batch_norm,
    "aten::new_ones": _new_like(aten.full.default, 1),
    "aten::new_zeros": _new_like(aten.full.default, 0),
    "aten::new_full": _new_like(aten.full.default),
    "aten::new_empty": _new_like(aten.empty.memory_format),
    "aten::ones_like": _new_like(aten.full.default, 1),
    "aten::zeros_like": _new_like(aten.full.default, 0),
}

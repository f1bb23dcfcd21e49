"""Drop the flattening that some layers put around a product: ``linear`` takes any number of leading dims."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from hgc.ir.value import info, set_info
from hgc.tracing.normalise.edit import aten, base, drop, tensor


def fuse_reshapes(graph: fx.Graph) -> None:
    """Merge chains of reshapes, and unwrap ``reshape(linear(reshape(x)))`` that only folds leading dims together."""
    for node in list(graph.nodes):
        if node.target is aten.linear.default:
            _unwrap(node)
    for node in list(graph.nodes):
        if node.target is aten.reshape.default:
            _merge(node)


def _merge(node: fx.Node) -> None:
    source = node.args[0]
    assert isinstance(source, fx.Node)
    if source.target is aten.reshape.default:
        node.args = (source.args[0], *node.args[1:])
        source = source.args[0]
    before, after = tensor(source), tensor(node)
    if before is not None and after is not None and before.shape == after.shape:
        drop(node, source)  # type: ignore[arg-type]


def _unwrap(node: fx.Node) -> None:
    flat = node.args[0]
    if base(flat) != "aten::reshape":  # type: ignore[arg-type]
        return
    source = flat.args[0]  # type: ignore[union-attr]
    before, after, result = tensor(source), tensor(flat), tensor(node)
    if before is None or after is None or result is None or len(after.shape) != 2 or before.shape[-1:] != after.shape[-1:]:
        return
    whole = (*before.shape[:-1], result.shape[-1])
    users = list(node.users)
    if any(user.target is not aten.reshape.default or tensor(user).shape != whole for user in users):  # type: ignore[union-attr]
        return
    node.args = (source, *node.args[1:])
    set_info(node, replace(info(node), value=replace(result, shape=whole)))
    for user in users:
        drop(user, node)

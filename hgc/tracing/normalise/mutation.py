"""Replace in-place operators by functional ones, through views and across block borders."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from hgc.errors import TraceError
from hgc.ir.value import Value, info
from hgc.tracing.normalise.cleanup import simplify
from hgc.tracing.normalise.edit import aten, base, insert, sizes_of, tensor
from hgc.tracing.normalise.views import looked_at, retake, write_back

_CHANGES_SHAPE = frozenset(
    f"aten::{name}_" for name in ("resize", "set", "squeeze", "unsqueeze", "t", "transpose", "swapaxes", "swapdims", "as_strided")
)
_RENAMED = {"aten::normal_": aten.normal_functional}


def make_functional(graph: fx.Graph, holders: dict[fx.Node, str]) -> list[str]:
    """Rewrite every in-place operator; returns sentences about buffers that no longer change.

    Raises ``TraceError`` for a buffer or parameter that is changed and read, and for in-place operators without a functional counterpart.
    """
    if not any(_is_in_place(node) for node in graph.nodes):
        return []
    memory = _Memory(holders)
    for node in list(graph.nodes):
        memory.refresh_arguments(node)
        if _is_in_place(node):
            memory.write(node, _functional(node))
        else:
            memory.note_view(node)
    memory.erase_in_place()
    simplify(graph)
    return memory.check_state()


def _is_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable


class _Memory:
    """Which node holds the current contents of each piece of memory. A piece is known by the node that made it, its root."""

    def __init__(self, holders: dict[fx.Node, str]) -> None:
        self.holders = holders
        self.sources: dict[fx.Node, fx.Node] = {}  # view -> what it looks at
        self.stand_ins: set[fx.Node] = set()  # nodes that hold a later value of their source, of the same shape
        self.contents: dict[fx.Node, fx.Node] = {}  # root -> its current value, where it changed
        self.versions: dict[fx.Node, int] = {}  # root -> number of writes
        self.taken: dict[fx.Node, tuple[int, fx.Node]] = {}  # view -> (version, the node that shows it)
        self.written: list[fx.Node] = []

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.sources:
            node = self.sources[node]
        return node

    def note_view(self, node: fx.Node) -> None:
        source = looked_at(node)
        if source is not None:
            self.sources[node] = source
            self.taken[node] = self.versions.get(self.root(node), 0), node

    def current(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """The node that computes what ``node``'s memory holds now; inserted in front of ``before`` if there is none yet."""
        root = self.root(node)
        version = self.versions.get(root, 0)
        if not version:
            return node
        if node is root:
            return self.contents[root]
        when, value = self.taken[node]
        if when != version:
            source = self.current(self.sources[node], before)
            value = source if node in self.stand_ins else retake(node, source, before)
            self.taken[node] = version, value
            self._stand_in(value, node, version)
        return value

    def _stand_in(self, value: fx.Node, node: fx.Node, version: int) -> None:
        """``value`` shows the same memory as ``node``; writing to it later writes there."""
        if value not in self.sources and value is not self.root(node):
            self.sources[value] = node
            self.stand_ins.add(value)
            self.taken[value] = version, value

    def refresh_arguments(self, node: fx.Node) -> None:
        if self.versions:
            node.args = fx.map_arg(node.args, lambda x: self.current(x, node))
            node.kwargs = fx.map_arg(node.kwargs, lambda x: self.current(x, node))

    def write(self, node: fx.Node, new: fx.Node) -> None:
        """The in-place operator ``node`` leaves ``new`` in the memory of its first argument."""
        step = node.args[0]
        assert isinstance(step, fx.Node)
        root = self.root(step)
        changed = [(step, new)]
        while step in self.sources:
            source = self.sources[step]
            if step not in self.stand_ins:
                new = write_back(step, self.current(source, node), new, node)
            changed.append((source, new))
            step = source
        self.contents[root] = new
        self.versions[root] = self.versions.get(root, 0) + 1
        self.sources[node] = changed[0][0]  # what an in-place operator returns is its argument
        self.stand_ins.add(node)
        self.taken[node] = self.versions[root], changed[0][1]
        for view, value in changed:
            if view is not root:
                self.taken[view] = self.versions[root], value
            self._stand_in(value, view, self.versions[root])
        self.written.append(node)

    def erase_in_place(self) -> None:
        for node in reversed(self.written):
            node.graph.erase_node(node)

    def check_state(self) -> list[str]:
        """After dead code is gone: state that changed must not be read at all, neither before nor after the change."""
        changed = [(name, node) for node, name in self.holders.items() if node in self.contents]
        for name, node in changed:
            if node.users:
                raise TraceError(
                    f"The model changes {name!r} in its forward and reads it; only the running statistics of batch norm may change, "
                    "so keep such state outside the model, or make it constant."
                )
        if not changed:
            return []
        more = f" and {len(changed) - 1} more buffers" if len(changed) > 1 else ""
        return [f"Not updated: {changed[0][0]}{more}, in which the model only counts and never reads the count."]


def _functional(node: fx.Node) -> fx.Node:
    """Insert the functional counterpart of an in-place operator in front of it."""
    before = tensor(node.args[0])
    name = base(node)
    if before is None or not name.endswith("_") or name in _CHANGES_SHAPE:
        raise _unknown(node)
    _source, *rest = node.args
    if name == "aten::copy_":
        new = _copied(node, rest[0], before)
    elif name in ("aten::zero_", "aten::fill_"):
        new = _filled(node, rest[0] if rest else 0, before)
    else:
        packet = _RENAMED.get(name) or getattr(aten, name.removeprefix("aten::")[:-1], None)
        overload = getattr(packet, node.target._overloadname, None) if packet is not None else None  # type: ignore[union-attr]
        if overload is None or len(overload._schema.returns) != 1 or overload._schema.is_mutable:
            raise _unknown(node)
        new = _cast_back(node, insert(node, overload, node.args, _promoted(node, before), node.kwargs), before)
    return new


def _promoted(node: fx.Node, before: Value) -> Value:
    dtype = before.dtype
    for x in node.all_input_nodes[1:]:
        other = tensor(x)
        if other is not None and other.shape and other.dtype.is_floating_point:
            dtype = torch.promote_types(dtype, other.dtype)
    return Value(before.shape, dtype)


def _cast_back(node: fx.Node, new: fx.Node, before: Value) -> fx.Node:
    found = tensor(new)
    assert found is not None
    return new if found.dtype == before.dtype else insert(node, aten.to.dtype, (new, before.dtype), before)


def _copied(node: fx.Node, source: Any, before: Value) -> fx.Node:
    found = tensor(source)
    assert found is not None
    if found.dtype != before.dtype:
        source = insert(node, aten.to.dtype, (source, before.dtype), Value(found.shape, before.dtype))
    if found.shape != before.shape:
        source = insert(node, aten.expand.default, (source, sizes_of(before.shape)), before)
    return insert(node, aten.alias.default, (source,), before)


def _filled(node: fx.Node, value: Any, before: Value) -> fx.Node:
    if isinstance(value, fx.Node):
        return _copied(node, value, before)
    return insert(node, aten.full.default, (sizes_of(before.shape), value), before, {"dtype": before.dtype})


def _unknown(node: fx.Node) -> TraceError:
    return TraceError(
        f"The model uses the in-place operator {base(node).removeprefix('aten::')} ({info(node).source}), which has no functional form; "
        "write that step without it."
    )

"""Find what tensor parallelism can split, from the graph alone.

A *region* is a part of a body that starts at column-parallel products (weights split by output features), stays split through
operators whose rules allow it at no cost (heads of attention, activation functions, gates), and closes at a row-parallel
product (weight split by input features), whose partial sums are reduced. No names, no model knowledge: a trial propagation by the rule
table decides.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import sympy
from torch import fx

from hgc.ir.placement import Invariant, Partial, Placement, Shard
from hgc.ir.rules import cases, make_call
from hgc.ir.rules.core import TO_THE_END, named_arguments, overloads
from hgc.ir.value import Value, info, is_size

_PRODUCTS = set(overloads("linear", "conv1d", "conv2d", "conv3d"))
_VIEWS = set(overloads("t", "transpose.int", "to.dtype", "permute"))
_MOST_SOURCES = 4
"""Products that may be left out of a region one at a time; more combinations are not tried."""


@dataclass
class Region:
    """Placements of a body's parameters (by placeholder) that split one region."""

    parameters: dict[fx.Node, Placement] = field(default_factory=dict)
    products: tuple[fx.Node, ...] = ()


def is_product(node: fx.Node) -> bool:
    """Is the node a product with a parameter: a linear map or a convolution?"""
    return node.op == "call_function" and node.target in _PRODUCTS and weight_of(node) is not None


def find_regions(graph: fx.Graph, axis: str, mesh: Mapping[str, int], hints: Mapping[sympy.Symbol, int]) -> list[Region]:
    """Disjoint regions of a body, in execution order."""
    return _Finder(graph, axis, dict(mesh), hints).regions()


def find_head(loss: fx.Node, axis: str, mesh: Mapping[str, int], hints: Mapping[sympy.Symbol, int]) -> Region | None:
    """The product that makes the logits of a cross entropy, if its classes can be split all the way to the loss."""
    return _Finder(loss.graph, axis, dict(mesh), hints).head(loss)


def before_loss(loss: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Operators between the logits' products and a cross entropy, and those products."""
    given = named_arguments(loss)
    return _between(given.get("logits", given.get("self")))


def weight_of(node: fx.Node) -> fx.Node | None:
    """The parameter placeholder behind a product's weight, through transposes and casts."""
    return _behind(named_arguments(node)["weight"], ("parameter",))


def _behind(argument: Any, roles: tuple[str, ...] = ("parameter", "buffer")) -> fx.Node | None:
    while isinstance(argument, fx.Node) and argument.op == "call_function" and argument.target in _VIEWS:
        argument = argument.args[0]
    is_state = isinstance(argument, fx.Node) and argument.op == "placeholder" and info(argument).role in roles
    return argument if is_state else None


class _Finder:
    def __init__(self, graph: fx.Graph, axis: str, mesh: dict[str, int], hints: Mapping[sympy.Symbol, int]) -> None:
        self.graph, self.axis, self.mesh, self.hints = graph, axis, mesh, hints
        self.taken: set[fx.Node] = set()

    def regions(self) -> list[Region]:
        found = []
        for node in self.graph.nodes:
            if is_product(node):
                given = named_arguments(node)
                region = self._reach(given["input"], Shard(_features(node, given["input"])))
                if region is not None and put(region.parameters, given["weight"], Shard(1)):
                    self.taken.update(region.products)
                    found.append(Region(region.parameters, (*region.products, node)))
        return found

    def head(self, loss: fx.Node) -> Region | None:
        """The product that makes the logits of a cross entropy, split by classes."""
        given = named_arguments(loss)
        logits = given.get("logits", given.get("self"))
        assert isinstance(logits, fx.Node)
        return self._reach(logits, Shard(1)) if len(_value(logits).shape) == 2 else None

    def _reach(self, goal: fx.Node, wanted: Shard) -> Region | None:
        """Products before ``goal`` whose split by output features arrives there as ``wanted``."""
        between, starts = _between(goal)
        if any(s in self.taken for s in starts):
            return None
        for chosen in _subsets(starts):
            for parts in itertools.product(*[_cuts(start) for start in chosen]):
                trial = _Trial(self, between, dict(zip(chosen, parts, strict=True)))
                if trial.run(goal, wanted):
                    return Region(trial.parameters, chosen)
        return None


def _features(product: fx.Node, operand: fx.Node) -> int:
    """The dim of a product's input or output that holds features."""
    return len(_value(operand).shape) - 1 if product.target in overloads("linear") else 1


def put(parameters: dict[fx.Node, Placement], argument: Any, placement: Shard) -> bool:
    """Place the parameter behind an argument so that the argument is placed as asked; False if that contradicts ``parameters``."""
    dim = placement.dim
    while isinstance(argument, fx.Node) and argument.op == "call_function" and argument.target in _VIEWS:
        if argument.target not in overloads("to.dtype"):
            dim = 1 - dim
        argument = argument.args[0]
    if not isinstance(argument, fx.Node) or argument.op != "placeholder":
        return False
    wanted = Shard(dim, placement.parts)
    return parameters.setdefault(argument, wanted) == wanted


def _between(source: Any) -> tuple[list[fx.Node], list[fx.Node]]:
    """Operators between the closing product and the products before it, in execution order, and those products."""
    inside: set[fx.Node] = set()
    starts: list[fx.Node] = []
    stack = [source]
    while stack:
        node = stack.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or is_size(node) or node in inside:
            continue
        if is_product(node):
            if node not in starts:
                starts.append(node)
            continue
        inside.add(node)
        stack.extend(node.all_input_nodes)
    if not starts:
        return [], []
    order = {node: i for i, node in enumerate(starts[0].graph.nodes)}
    return sorted(inside, key=order.__getitem__), sorted(starts, key=order.__getitem__)


def _subsets(starts: list[fx.Node]) -> Iterator[tuple[fx.Node, ...]]:
    yield tuple(starts)
    if 1 < len(starts) <= _MOST_SOURCES:
        for size in range(len(starts) - 1, 0, -1):
            yield from itertools.combinations(starts, size)


def _cuts(start: fx.Node) -> list[Any]:
    """1, and the parts into which the users split the features (``[q; k; v]``, gate and up)."""
    found: list[Any] = [1]
    value = info(start).value
    assert isinstance(value, Value)
    stack, features = [start], value.shape[-1]
    for node in stack:
        found.extend(_sliced(node, features))
        for user in node.users:
            name = getattr(getattr(user.target, "_schema", None), "name", "")
            shape = info(user).value if user.op == "call_function" else None
            if name in ("aten::split", "aten::split_with_sizes", "aten::chunk") and isinstance(shape, tuple):
                sizes = tuple(int(v.shape[-1]) for v in shape)
                if sum(sizes) == features:
                    found.append(len(sizes) if len(set(sizes)) == 1 else sizes)
            elif name in ("aten::add", "aten::to"):
                stack.append(user)
            elif name in ("aten::reshape", "aten::unflatten") and isinstance(shape, Value):
                found.extend(int(s) for s in shape.shape if s.is_Integer and 1 < int(s) < 5 and s not in value.shape)
                if len(shape.shape) == len(value.shape) or shape.shape[-1] == features:
                    stack.append(user)
    return list(dict.fromkeys(found))


def _sliced(node: fx.Node, features: sympy.Expr) -> list[Any]:
    """The parts that slices of the last dim take, if together they are the whole."""
    bounds: list[tuple[int, int]] = []
    for user in node.users:
        if user.target in overloads("slice.Tensor") and features.is_Integer:
            given = named_arguments(user)
            start, end = given["start"] or 0, given["end"] if given["end"] is not None else TO_THE_END
            if given["dim"] in (-1, len(_value(node).shape) - 1) and given["step"] == 1 and isinstance(start, int) and isinstance(end, int):
                bounds.append(slice(start, end).indices(int(features))[:2])
    bounds = sorted(set(bounds))
    sizes = tuple(end - start for start, end in bounds)
    if len(bounds) < 2 or sum(sizes) != features or any(a[1] != b[0] for a, b in itertools.pairwise(bounds)):
        return []
    return [len(sizes) if len(set(sizes)) == 1 else sizes]


class _Trial:
    """Propagate the split from the chosen starts through the operators between, at no cost."""

    def __init__(self, finder: _Finder, between: list[fx.Node], starts: dict[fx.Node, Any]) -> None:
        self.finder, self.between, self.starts = finder, between, starts
        self.placed: dict[fx.Node, Placement] = {}
        self.parameters: dict[fx.Node, Placement] = {}

    def run(self, goal: fx.Node, wanted: Shard) -> bool:
        if not all(self._start(start, parts) for start, parts in self.starts.items()):
            return False
        for node in self.between:
            if any(n in self.placed for n in node.all_input_nodes) and not self._propagate(node):
                return False
        return self.placed.get(goal) == wanted

    def _start(self, node: fx.Node, parts: Any) -> bool:
        given = named_arguments(node)
        features = _features(node, node)
        whole = _value(node).shape[features]
        sizes = parts if isinstance(parts, tuple) else (whole / parts,)
        if not all(sympy.sympify(size).is_Integer and int(size) % self.finder.mesh[self.finder.axis] == 0 for size in sizes):
            return False
        if given.get("groups", 1) != 1:
            return False
        self.placed[node] = Shard(features, parts)
        bias = given["bias"]
        return put(self.parameters, given["weight"], Shard(0, parts)) and (bias is None or put(self.parameters, bias, Shard(0, parts)))

    def _propagate(self, node: fx.Node) -> bool:
        """Place one operator; values from outside the region may be cut, parameters take what the operator asks for."""
        if node.target is operator.getitem:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self.placed[node] = self.placed[source]
            return True
        found = {n: self.placed.get(n, Invariant()) for n in node.all_input_nodes if not is_size(n)}
        call = make_call(node, self.finder.axis, self.finder.mesh, self.finder.hints, found)
        for case in cases(call):
            pairs = [(o.node, p) for o, p in zip(call.operands, case.inputs, strict=True)]
            if isinstance(case.outputs[0], Shard) and all(self._accepts(n, p) for n, p in pairs):
                for operand, placement in pairs:
                    if _behind(operand) is not None and isinstance(placement, Shard):
                        put(self.parameters, operand, placement)
                self.placed[node] = case.outputs[0]
                return True
        return False

    def _accepts(self, node: fx.Node, wanted: Placement) -> bool:
        if node in self.placed:
            return self.placed[node] == wanted
        if isinstance(wanted, Partial):
            return False
        if isinstance(wanted, Shard) and _behind(node) is not None:
            return put(dict(self.parameters), node, wanted)
        return True


def _value(node: Any) -> Value:
    found = info(node).value
    assert isinstance(found, Value)
    return found

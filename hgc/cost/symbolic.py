"""Costs as sympy expressions in a program's symbols: of a node, of a block body, of the whole program; and numbers from them, fast.

All of them are what *one rank* does. FLOPs are those of matrix products and convolutions, a multiply-add counting two, as torch's
``FlopCounterMode`` counts them. Conventions of bytes are in docs/design/costs.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import sympy
import torch
from numpy.typing import NDArray

from hgc.cost.kernels import NO_KERNELS, Kernels
from hgc.errors import HgcError
from hgc.ir.input_sizes import evaluate
from hgc.ir.value import Size

Numbers: TypeAlias = int | NDArray[Any]
ZERO: Size = sympy.Integer(0)


@dataclass(frozen=True)
class Communication:
    """Calls of one collective on one mesh axis.

    ``payload_bytes`` is, summed over ``calls``, the larger of what a rank puts in and gets out: the whole tensor of an all-reduce, the
    gathered one of an all-gather, the input of a reduce-scatter, the input of an all-to-all (the sizes that nccl-tests prints), the message
    of a send to the next rank.
    """

    collective: str  # "all_reduce" | "all_gather" | "reduce_scatter" | "all_to_all" | "send"
    axis: str
    ranks: int
    payload_bytes: Size
    backward: bool = False
    calls: int = 1

    @property
    def sent_bytes(self) -> Size:
        """What each rank sends, on average, in a ring or a direct exchange: no algorithm without help of switches sends less."""
        if self.collective == "send":
            return self.payload_bytes
        rounds = 2 if self.collective == "all_reduce" else 1
        return self.payload_bytes * sympy.Rational(rounds * (self.ranks - 1), self.ranks)

    def times(self, count: int) -> Communication:
        return replace(self, payload_bytes=self.payload_bytes * count, calls=self.calls * count)


def largest(found: Iterable[Size]) -> Size:
    """The maximum of expressions in positive symbols, without those that another one exceeds in every term."""
    kept: list[Size] = []
    for each in {sympy.expand(e) for e in found}:
        if not any(_covers(other, each) for other in kept):
            kept = [other for other in kept if not _covers(each, other)] + [each]
    return sympy.Max(ZERO, *kept) if len(kept) != 1 else kept[0]


def _covers(large: Size, small: Size) -> bool:
    """Every term of the difference is positive, so it is nowhere negative."""
    difference = sympy.expand(large - small)
    return all(term.is_nonnegative for term in sympy.Add.make_args(difference))


def merge(found: Iterable[Communication]) -> tuple[Communication, ...]:
    """One entry for each collective, axis and direction."""
    merged: dict[tuple[str, str, bool], Communication] = {}
    for each in found:
        key = (each.collective, each.axis, each.backward)
        known = merged.get(key)
        payload, calls = (known.payload_bytes, known.calls) if known else (ZERO, 0)
        merged[key] = replace(each, payload_bytes=payload + each.payload_bytes, calls=calls + each.calls)
    return tuple(merged.values())


@dataclass(frozen=True)
class Kept:
    """Memory that backward needs: that of a body input or of a node's result by its name, or ``"node:0"`` for what a node has inside."""

    memory: str
    bytes: Size


@dataclass(frozen=True)
class Result:
    """A tensor: its node (with ``.0`` for the first of several results), the name of its memory (for views: that of what they view),
    bytes, and whether it has a gradient."""

    name: str
    memory: str
    bytes: Size
    has_gradient: bool


@dataclass(frozen=True)
class NodeCost:
    """One operator call.

    ``read_bytes``, ``written_bytes``: operands and results, each tensor once, nothing for views; of a table that is looked up, the rows
    found. Backward reads the gradients of the results and what was saved, and writes the gradients of the operands. ``saved_bytes``: memory
    that this node is the first in its body to keep for backward, without parameters and body inputs. ``backward_step_bytes``: what its
    backward holds beside that while it runs, gradients of results and everything that its kernels write.

    ``forward``, ``backward_input``, ``backward_weight``: the kernels, those of backward apart by whether they make gradients of activations
    or of parameters. ``inputs``: its operands. ``needs``: all that its backward needs, whoever keeps it. ``regular``: each
    element of a result comes from few elements or one row of the operands, so the node can run in one kernel with its neighbours.
    """

    name: str
    operator: str
    path: str
    forward_flops: Size = ZERO
    backward_flops: Size = ZERO
    read_bytes: Size = ZERO
    written_bytes: Size = ZERO
    backward_read_bytes: Size = ZERO
    backward_written_bytes: Size = ZERO
    saved_bytes: Size = ZERO
    backward_step_bytes: Size = ZERO
    communication: tuple[Communication, ...] = ()
    forward: Kernels = NO_KERNELS
    backward_input: Kernels = NO_KERNELS
    backward_weight: Kernels = NO_KERNELS
    inputs: tuple[Result, ...] = ()
    results: tuple[Result, ...] = ()
    needs: tuple[Kept, ...] = ()
    regular: bool = False


@dataclass(frozen=True)
class OutputCost:
    """A result of a body: its bytes, those of the memory it lives in, whether the body keeps that, and the input whose memory it is;
    names of the value and of its memory, as in :class:`Result`."""

    value_bytes: Size
    storage_bytes: Size
    kept: bool
    input: int | None = None
    name: str = ""
    memory: str = ""
    dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class BodyCost:
    """One call of a block body. ``kept_inputs``: positions of activations and state that backward needs; ``state``: which are state.

    ``hints``: the traced sizes, by which to compare expressions.
    """

    name: str
    nodes: tuple[NodeCost, ...]
    inputs: tuple[Result, ...]
    state: tuple[bool, ...]
    outputs: tuple[OutputCost, ...]
    parameter_bytes: Size
    buffer_bytes: Size
    kept_inputs: tuple[int, ...]
    notes: tuple[str, ...] = ()
    hints: Mapping[sympy.Symbol, int] = field(default_factory=dict)

    @cached_property
    def input_bytes(self) -> tuple[Size, ...]:
        return tuple(found.bytes for found in self.inputs)

    def total(self, quantity: Callable[[NodeCost], Size]) -> Size:
        return sympy.Add(*map(quantity, self.nodes))

    @cached_property
    def forward_flops(self) -> Size:
        return self.total(lambda node: node.forward_flops)

    @cached_property
    def backward_flops(self) -> Size:
        return self.total(lambda node: node.backward_flops)

    @cached_property
    def forward_bytes(self) -> Size:
        """Read and written."""
        return self.total(lambda node: node.read_bytes + node.written_bytes)

    @cached_property
    def backward_bytes(self) -> Size:
        return self.total(lambda node: node.backward_read_bytes + node.backward_written_bytes)

    @cached_property
    def saved_bytes(self) -> Size:
        """Kept for backward, without parameters, buffers and the body's inputs."""
        return self.total(lambda node: node.saved_bytes)

    @cached_property
    def output_bytes(self) -> Size:
        return sympy.Add(*(output.value_bytes for output in self.outputs))

    @cached_property
    def communication(self) -> tuple[Communication, ...]:
        return merge(each for node in self.nodes for each in node.communication)

    @cached_property
    def largest_step_bytes(self) -> Size:
        """The most that the backward of one node holds beside what is saved; see :func:`largest`."""
        return largest(node.backward_step_bytes for node in self.nodes)


@dataclass(frozen=True)
class ProgramCosts:
    """All bodies with how often each is called; totals are of one forward and backward on one rank.

    ``saved_bytes`` counts memory that several blocks share once, and leaves out parameters, buffers and the batch (``saved_batch_bytes``).
    ``parameter_bytes``: the rank's part of all parameters, each once. ``notes``: what could not be measured and how it was counted.
    ``with_loss``: the bodies that compute the loss; a pipeline stage may have none. ``repeated``: the bodies of blocks that follow one
    another (``layers.3``), which recomputation applies to.
    """

    bodies: Mapping[str, BodyCost]
    calls: Mapping[str, int]
    symbols: tuple[sympy.Symbol, ...]
    saved_bytes: Size
    saved_batch_bytes: Size
    parameter_bytes: Size
    buffer_bytes: Size
    notes: tuple[str, ...] = ()
    with_loss: frozenset[str] = frozenset()
    repeated: frozenset[str] = frozenset()

    def total(self, quantity: Callable[[BodyCost], Size]) -> Size:
        """The sum over all blocks."""
        return sympy.Add(*(quantity(body) * self.calls[name] for name, body in self.bodies.items()))

    @cached_property
    def forward_flops(self) -> Size:
        return self.total(lambda body: body.forward_flops)

    @cached_property
    def backward_flops(self) -> Size:
        return self.total(lambda body: body.backward_flops)

    @cached_property
    def communication(self) -> tuple[Communication, ...]:
        return merge(each.times(self.calls[name]) for name, body in self.bodies.items() for each in body.communication)

    def expressions(self) -> dict[str, Size]:
        """The totals by name, ready for :class:`Formulas`."""
        return {
            "forward_flops": self.forward_flops,
            "backward_flops": self.backward_flops,
            "forward_bytes": self.total(lambda body: body.forward_bytes),
            "backward_bytes": self.total(lambda body: body.backward_bytes),
            "saved_bytes": self.saved_bytes,
            "parameter_bytes": self.parameter_bytes,
            **{
                f"{each.collective}_{each.axis}_{'backward' if each.backward else 'forward'}_bytes": each.payload_bytes
                for each in self.communication
            },
        }


class Formulas:
    """Named expressions compiled once; a call evaluates them all for whole arrays of sizes.

    Results are ``float64`` (exact to 2**53; FLOPs of large jobs do not fit into 64-bit integers). Raises ``HgcError`` for a missing size.
    """

    def __init__(self, expressions: Mapping[str, Size], symbols: Iterable[sympy.Symbol]) -> None:
        self.names = tuple(expressions)
        self.symbols = tuple(symbols)
        self._function = sympy.lambdify(self.symbols, [sympy.sympify(e) for e in expressions.values()], modules="numpy", cse=True)

    def __call__(self, sizes: Mapping[str, Numbers]) -> dict[str, NDArray[np.float64]]:
        """``sizes``: symbol name -> number or array, all arrays of one shape."""
        missing = [symbol.name for symbol in self.symbols if symbol.name not in sizes]
        if missing:
            raise HgcError(f"the size {missing[0]!r} is missing; give a number for each of {', '.join(s.name for s in self.symbols)}")
        given = [np.asarray(sizes[symbol.name], dtype=np.float64) for symbol in self.symbols]
        shape = np.broadcast_shapes(*(array.shape for array in given))
        results = self._function(*given)
        return {name: np.broadcast_to(np.asarray(found, dtype=np.float64), shape) for name, found in zip(self.names, results, strict=True)}


def exact(expression: Size, sizes: Mapping[sympy.Symbol, int]) -> int:
    """The value at one point in whole numbers, fractions rounded up. Raises ``KeyError`` for a symbol without a size."""
    return int(sympy.ceiling(evaluate(sympy.sympify(expression), sizes)))

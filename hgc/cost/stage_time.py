"""How long the blocks of a program take on one rank: seconds of compute and of collectives, in order, forward and backward.

:class:`StageTimes` compiles the sizes of all kernels once; a call gives the times for other sizes, devices and places in well under a
millisecond a body. Kernels take what ``hgc.cost.compute`` says, collectives what ``hgc.cost.collectives`` says; nothing overlaps here:
who schedules decides that, from the order of the segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import sympy
from numpy.typing import NDArray

from hgc.cluster import Device
from hgc.cost.collectives import Kind, Place, time_s
from hgc.cost.compute import ELEMENT_BYTES, attention_time_s, causal_pairs, matmul_time_s, memory_time_s, window_pairs
from hgc.cost.execution import EAGER, Execution
from hgc.cost.fusion import fused_work
from hgc.cost.kernels import Kernels, Product
from hgc.cost.symbolic import ZERO, Communication, ProgramCosts, merge
from hgc.cost.work import Work, eager_work, regathering, run_again, without_copies
from hgc.errors import HgcError
from hgc.ir.value import Size
from hgc.plan import Precision
from hgc.strategy import Strategy

Seconds = NDArray[np.float64]
FORWARD, INPUT, WEIGHT = range(3)


@dataclass(frozen=True)
class Segment:
    """Compute, or one collective (``collective`` is not ""): ``axis``, and ``payload_bytes`` as nccl-tests counts.

    ``weight``: makes gradients of parameters only, so nothing in the block waits for it. ``hidden_s``: of a collective, what runs under the
    kernel before it (keys and values of ring attention travel while the kernel works); ``seconds`` is what is left.
    """

    seconds: float
    collective: str = ""
    axis: str = ""
    payload_bytes: float = 0.0
    weight: bool = False
    hidden_s: float = 0.0


@dataclass(frozen=True)
class BlockTime:
    """One call of a body on one rank. Seconds are sums over segments, collectives included, as if nothing overlapped.

    ``backward_input_s`` is what the gradient of the block's inputs takes (with collectives and ``recompute_s``, the part that runs forward
    again), ``backward_weight_s`` what gradients of parameters take beyond it.
    """

    body: str
    forward: tuple[Segment, ...]
    backward: tuple[Segment, ...]
    recompute_s: float = 0.0

    @property
    def forward_s(self) -> float:
        return sum(segment.seconds for segment in self.forward)

    @property
    def backward_input_s(self) -> float:
        return sum(segment.seconds for segment in self.backward if not segment.weight)

    @property
    def backward_weight_s(self) -> float:
        return sum(segment.seconds for segment in self.backward if segment.weight)

    @property
    def backward_s(self) -> float:
        return sum(segment.seconds for segment in self.backward)


@dataclass(frozen=True)
class _Step:
    """A slot of compute, or a collective whose payload is an expression of that number; ``slot`` is then the kernel that hides it."""

    slot: int = -1
    weight: bool = False
    collective: Communication | None = None
    payload: int = -1


class StageTimes:
    """Times of every distinct body of a program, whose ``costs`` are those of the lowered program.

    ``strategy.recompute`` says what backward runs again, ``precision.products`` in which type products of linear layers run: then their
    operands are quantised, in memory-bound kernels; the block with the loss (the output projection) keeps its type, as do attention and
    norms. Only blocks that repeat are run again, as the transform has it.
    """

    def __init__(
        self,
        costs: ProgramCosts,
        strategy: Strategy,
        precision: Precision | None = None,
        execution: Execution = EAGER,
    ) -> None:
        self.symbols = costs.symbols
        self.execution = execution
        self._builder = _Builder(precision.products if precision else "")
        self._steps: dict[str, tuple[list[_Step], list[_Step], list[_Step]]] = {}
        for name, body in costs.bodies.items():
            works = fused_work(body) if execution.fused else eager_work(body)
            works = tuple(without_copies(work) for work in works) if execution.copy_free_collectives else works
            works = regathering(body, works) if execution.regathers else works
            again = run_again(body, works, strategy.recompute, execution) if name in costs.repeated else ()
            self._steps[name] = self._builder.add(works, again, narrow=name not in costs.with_loss)
        self._evaluate = self._builder.compiled(self.symbols)

    def __call__(self, sizes: Mapping[str, float], device: Device, places: Mapping[str, Place]) -> dict[str, BlockTime]:
        """``sizes``: symbol name -> number (of one micro-batch, all ranks together); ``places``: mesh axis -> where its group sits.

        Raises ``HgcError`` for a size or an axis that is missing, ``ClusterError`` for a data type that the device does not have.
        """
        missing = [symbol.name for symbol in self.symbols if symbol.name not in sizes]
        if missing:
            raise HgcError(f"the size {missing[0]!r} is missing; give a number for each of {', '.join(s.name for s in self.symbols)}")
        numbers = np.asarray(self._evaluate(*(float(sizes[symbol.name]) for symbol in self.symbols)), dtype=np.float64)
        seconds = self._builder.seconds(numbers, _launching(device, self.execution))
        return {name: _block_time(name, steps, seconds, numbers, places) for name, steps in self._steps.items()}


@lru_cache(maxsize=64)
def _launching(device: Device, execution: Execution) -> Device:
    """The device with what a kernel costs at least under that execution."""
    launch_s = 0.0 if execution.launch_free else device.kernels.launch_s + execution.dispatch_s
    return device if launch_s == device.kernels.launch_s else replace(device, kernels=replace(device.kernels, launch_s=launch_s))


class _Builder:
    """Collects sizes of kernels as one list of expressions, and for each kernel the slot of compute that it belongs to."""

    def __init__(self, products: str) -> None:
        self._narrow = products
        self._expressions: dict[Size, int] = {}
        self._slots = 0
        self._products: dict[str, list[tuple[int, ...]]] = {}  # dtype -> slot and numbers of batch, m, n, k
        self._attentions: dict[tuple[str, bool, int, bool], list[tuple[int, ...]]] = {}
        self._moves: list[tuple[int, int, int]] = []  # slot, number of the bytes, kernels

    def add(self, works: tuple[Work, ...], again: tuple[Work, ...], narrow: bool) -> tuple[list[_Step], list[_Step], list[_Step]]:
        """Steps of forward, of what runs again, of backward."""
        slots = {id(work): [self._slot(k, narrow) for k in (work.forward, work.backward_input, work.backward_weight)] for work in works}
        forward = [step for work in works for step in self._forward(work, slots[id(work)][FORWARD])]
        repeated = [step for work in again for step in self._forward(work, slots[id(work)][FORWARD])]
        backward = []
        for work in reversed(works):
            backward += [self._collective(each) for each in work.regathered]
            backward.append(_Step(slots[id(work)][INPUT]))
            backward += self._collectives(work, slots[id(work)][INPUT], backward=True)
            backward.append(_Step(slots[id(work)][WEIGHT], weight=True))
        return forward, repeated, backward

    def _forward(self, work: Work, slot: int) -> list[_Step]:
        return [_Step(slot), *self._collectives(work, slot, backward=False)]

    def _collectives(self, work: Work, slot: int, backward: bool) -> list[_Step]:
        found = [each for each in work.communication if each.backward == backward]
        sends = merge(each for each in found if each.collective == "send")
        others = (self._collective(each) for each in found if each.collective != "send")
        return [*others, *(self._collective(each, slot) for each in sends)]

    def _collective(self, found: Communication, under: int = -1) -> _Step:
        return _Step(under, collective=found, payload=self._number(found.payload_bytes))

    def _slot(self, kernels: Kernels, narrow: bool) -> int:
        slot, self._slots = self._slots, self._slots + 1
        moved, moves = kernels.moved_bytes, kernels.moves
        for product in kernels.products:
            quantised = narrow and bool(self._narrow) and product.linear
            dtype = self._narrow if quantised else dtype_name(product.dtype)
            sizes = (product.batch, product.m, product.n, product.k)
            self._products.setdefault(dtype, []).append((slot, *map(self._number, sizes)))
            if quantised:
                moved, moves = moved + quantised_bytes(product, ELEMENT_BYTES[dtype]), moves + 1
        for each in kernels.attentions:
            key = (dtype_name(each.dtype), each.causal, each.window, each.backward)
            shape = (each.batch, each.heads, each.queries, each.keys, each.head_dim)
            self._attentions.setdefault(key, []).append((slot, *map(self._number, shape)))
        if moved != ZERO:
            self._moves.append((slot, self._number(moved), moves))
        return slot

    def _number(self, size: Size) -> int:
        return self._expressions.setdefault(sympy.sympify(size), len(self._expressions))

    def compiled(self, symbols: Iterable[sympy.Symbol]) -> Callable[..., list[float]]:
        function: Callable[..., list[float]] = sympy.lambdify(list(symbols), list(self._expressions), modules="math", cse=True)
        return function

    def seconds(self, numbers: Seconds, device: Device) -> Seconds:
        """Of each slot."""
        total = np.zeros(self._slots)
        for dtype, products in self._products.items():
            slot, *sizes = np.asarray(products).T
            batch, m, n, k = (numbers[index] for index in sizes)
            np.add.at(total, slot, matmul_time_s(device, m, n, k, batch, dtype))
        for (dtype, causal, window, backward), attentions in self._attentions.items():
            slot, *indices = np.asarray(attentions).T
            batch, heads, queries, keys, head_dim = (numbers[index] for index in indices)
            pairs = _pairs(queries, keys, causal, window)
            time = attention_time_s(device, batch, heads, queries, keys, head_dim, dtype, pairs=pairs, backward=backward)
            np.add.at(total, slot, time)
        if self._moves:
            slot, bytes_, kernels = np.asarray(self._moves).T
            np.add.at(total, slot, memory_time_s(device, numbers[bytes_], kernels.astype(np.float64)))
        return total


def dtype_name(dtype: Any) -> str:
    """As ``hgc.cost.compute`` spells it."""
    return str(dtype).removeprefix("torch.")


def quantised_bytes(product: Product, element_bytes: float) -> Size:
    """The left operand (activations forward, the gradient backward) is read and written narrow twice, as it is and transposed.

    Of a weight's gradient both operands exist already; weights are quantised once a step, with the optimizer.
    """
    return product.batch * product.m * product.k * sympy.Rational(str(product.dtype.itemsize + 2 * element_bytes))


def _pairs(queries: Seconds, keys: Seconds, causal: bool, window: int) -> Seconds | None:
    if window:
        return window_pairs(queries, keys, np.full_like(queries, window))
    return causal_pairs(queries, keys) if causal else None


def _block_time(name: str, steps: tuple[list[_Step], ...], seconds: Seconds, numbers: Seconds, places: Mapping[str, Place]) -> BlockTime:
    forward, again, backward = (_segments(each, seconds, numbers, places) for each in steps)
    return BlockTime(name, forward, again + backward, sum(segment.seconds for segment in again))


def _segments(steps: list[_Step], seconds: Seconds, numbers: Seconds, places: Mapping[str, Place]) -> tuple[Segment, ...]:
    """Neighbouring slots of one kind are one segment."""
    found: list[Segment] = []
    computed, weight = 0.0, False
    for step in steps:
        if step.collective is None:
            time = float(seconds[step.slot])
            if step.weight != weight and time:
                found += [Segment(computed, weight=weight)] if computed else []
                computed, weight = 0.0, step.weight
            computed += time
        else:
            found += [Segment(computed, weight=weight)] if computed else []
            found.append(_collective(step.collective, float(numbers[step.payload]), places, seconds[step.slot] if step.slot >= 0 else 0.0))
            computed, weight = 0.0, False
    return tuple(found + ([Segment(computed, weight=weight)] if computed else []))


def _collective(found: Communication, payload_bytes: float, places: Mapping[str, Place], under_s: float) -> Segment:
    if found.axis not in places:
        raise HgcError(f"nothing says where the ranks of axis {found.axis!r} sit; give a place for each of the program's axes")
    kind: Kind = found.collective  # type: ignore[assignment]
    seconds = time_s(kind, payload_bytes / found.calls, places[found.axis]) * found.calls
    hidden_s = min(float(under_s), seconds)
    return Segment(seconds - hidden_s, found.collective, found.axis, payload_bytes, hidden_s=hidden_s)

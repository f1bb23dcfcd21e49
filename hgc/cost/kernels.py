"""The kernels that an operator runs, with sizes as expressions: products, fused attention, and everything else by the bytes it moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from hgc._torch_compat import storage_key
from hgc.ir.value import Size

ZERO: Size = sympy.Integer(0)


@dataclass(frozen=True)
class Product:
    """``batch`` products of (m, k) by (k, n). ``linear``: an operand, or the result, belongs to a parameter."""

    batch: Size
    m: Size
    n: Size
    k: Size
    dtype: torch.dtype
    linear: bool = False


@dataclass(frozen=True)
class Attention:
    """One fused attention kernel: ``batch`` sequences, ``heads`` query heads. ``window``: 0, or how many keys a query sees at most."""

    batch: Size
    heads: Size
    queries: Size
    keys: Size
    head_dim: Size
    dtype: torch.dtype
    causal: bool = False
    window: int = 0
    backward: bool = False


@dataclass(frozen=True)
class Kernels:
    """What runs on the device, in any order. ``moves`` memory-bound kernels read and write ``moved_bytes`` altogether."""

    products: tuple[Product, ...] = ()
    attentions: tuple[Attention, ...] = ()
    moved_bytes: Size = ZERO
    moves: int = 0

    @property
    def computes(self) -> bool:
        """Is there a product or attention among them?"""
        return bool(self.products or self.attentions)


NO_KERNELS = Kernels()


def together(found: Iterable[Kernels]) -> Kernels:
    """All of several."""
    all_of = list(found)
    return Kernels(
        tuple(product for each in all_of for product in each.products),
        tuple(attention for each in all_of for attention in each.attentions),
        sympy.Add(*(each.moved_bytes for each in all_of)),
        sum(each.moves for each in all_of),
    )


# -- watching kernels ---------------------------------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """Kernels as they are called, with sizes as torch has them; :meth:`kernels` makes expressions of those.

    Whoever stands in for one fused kernel says so with :func:`fused_attention`; what it calls inside is not recorded.
    """

    products: list[tuple[Any, ...]] = field(default_factory=list)  # batch, m, n, k, dtype
    attentions: list[tuple[Any, ...]] = field(default_factory=list)  # fields of Attention
    moved: list[Any] = field(default_factory=list)  # bytes of each kernel
    paused: bool = False

    def report(self, func: Any, args: Sequence[Any], kwargs: Any, result: Any) -> None:
        """One operator that reached a kernel, from ``watching_calls``."""
        if self.paused:
            return
        products = _PRODUCTS.get(func.overloadpacket)
        if products is not None:
            self.products.extend(products(args, result))
        elif not _moves_nothing(func, args, result):
            read = _tensors([*args, *(kwargs or {}).values()])
            written = _tensors(_listed(result))
            if func.overloadpacket in _LOOKUPS:
                read = [*written, *read[1:]]
            self.moved.append(sum(indexed_bytes(t) for t in (*read, *written)))

    def kernels(self, expression: Callable[[Any], Size], linear: bool) -> Kernels:
        """``linear``: do products belong to a parameter?"""
        return Kernels(
            tuple(_product(expression, found, linear) for found in self.products),
            tuple(Attention(*(expression(size) for size in found[:5]), *found[5:]) for found in self.attentions),
            sympy.Add(*map(expression, self.moved)),
            len(self.moved),
        )

    def without(self, other: Recorder) -> Recorder:
        """What is here and not in the other, which ran a part of the same."""
        return Recorder(_beyond(self.products, other.products), _beyond(self.attentions, other.attentions))


def _beyond(found: list[tuple[Any, ...]], known: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    left = Counter(map(str, known))
    beyond = []
    for each in found:
        if left[str(each)]:
            left[str(each)] -= 1
        else:
            beyond.append(each)
    return beyond


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Make :func:`fused_attention` report to this recorder."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


@contextmanager
def fused_attention(q: Tensor, keys: Any, causal: bool, window: int, backward: bool) -> Iterator[None]:
    """What is called inside is one kernel: queries [B, H, S, D], each with ``keys`` keys if nothing is masked."""
    recorder = _recorder.get()
    if recorder is None:
        yield
        return
    batch, heads, queries, head_dim = q.shape
    recorder.attentions.append((batch, heads, queries, keys, head_dim, q.dtype, causal, window, backward))
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = False


@contextmanager
def grouped_products(groups: Any, products: Sequence[tuple[Any, Any, Any]], rows: Any, dtype: torch.dtype) -> Iterator[None]:
    """What is called inside is one kernel: ``groups`` times each (m, n, k), where ``rows`` of all groups are shared out evenly."""
    recorder = _recorder.get()
    if recorder is None:
        yield
        return
    each = (rows, groups)
    recorder.products += [(groups, *(each if size is rows else size for size in sizes), dtype) for sizes in products]
    recorder.paused = True
    try:
        yield
    finally:
        recorder.paused = False


def _product(expression: Callable[[Any], Any], found: tuple[Any, ...], linear: bool) -> Product:
    batch, m, n, k = (_size(expression, size) for size in found[:4])
    return Product(batch, m, n, k, found[4], linear)


def _size(expression: Callable[[Any], Any], size: Any) -> Any:
    """Of a size, or of a pair: the first divided by the second."""
    return expression(size[0]) / expression(size[1]) if isinstance(size, tuple) else expression(size)


# -- operators of torch -------------------------------------------------------------------------------------------------------------------

Sizes = tuple[Any, ...]


def _mm(args: Sequence[Any], result: Any) -> list[Sizes]:
    a, b = args[:2]
    return [(1, a.shape[0], b.shape[1], a.shape[1], a.dtype)]


def _bmm(args: Sequence[Any], result: Any) -> list[Sizes]:
    a, b = args[:2]
    return [(a.shape[0], a.shape[1], b.shape[2], a.shape[2], a.dtype)]


def _convolution(args: Sequence[Any], result: Any) -> list[Sizes]:
    """As one product for each group: a row for each position of the output."""
    x, weight, groups = args[0], args[1], args[8]
    channels, inner = weight.shape[0] // groups, _numel(weight.shape[1:])
    return [(groups, x.shape[0] * _numel(result.shape[2:]), channels, inner, x.dtype)]


def _convolution_backward(args: Sequence[Any], result: Any) -> list[Sizes]:
    gradient, x, weight, groups = args[0], args[1], args[2], args[9]
    for_input, for_weight = args[10][:2]
    channels, inner = weight.shape[0] // groups, _numel(weight.shape[1:])
    rows = x.shape[0] * _numel(gradient.shape[2:])
    found = [(groups, rows, inner, channels, x.dtype)] if for_input else []
    return found + ([(groups, channels, inner, rows, x.dtype)] if for_weight else [])


_aten = torch.ops.aten
_PRODUCTS: dict[Any, Callable[[Sequence[Any], Any], list[Sizes]]] = {
    _aten.mm: _mm,
    _aten.addmm: lambda args, result: _mm(args[1:], result),
    _aten.bmm: _bmm,
    _aten.baddbmm: lambda args, result: _bmm(args[1:], result),
    _aten.convolution: _convolution,
    _aten.convolution_backward: _convolution_backward,
}
_LOOKUPS = frozenset({_aten.embedding, _aten.index_select, _aten.gather, _aten.index})
"""Of their first tensor they read as much as they return."""
_ALLOCATIONS = frozenset({"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "wait_tensor", "sym_size"})


def _moves_nothing(func: Any, args: Sequence[Any], result: Any) -> bool:
    """Views, allocations, collectives (which are counted as communication)."""
    namespace, _, name = func.name().partition("::")
    name = name.partition(".")[0]
    if namespace == "_c10d_functional" or name in _ALLOCATIONS:
        return True
    results = _tensors(_listed(result))
    if not results:
        return True
    known = {storage_key(t) for t in _tensors(args)}
    return not func._schema.is_mutable and all(storage_key(t) in known for t in results)


def indexed_bytes(tensor: Tensor) -> Any:
    """Bytes that a kernel moves for a tensor: what was expanded is read once."""
    distinct = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if not (isinstance(stride, int) and stride == 0)]
    return _numel(distinct) * tensor.element_size()


def _numel(sizes: Iterable[Any]) -> Any:
    total: Any = 1
    for size in sizes:
        total = total * size
    return total


def _listed(found: Any) -> list[Any]:
    return list(found) if isinstance(found, list | tuple) else [found]


def _tensors(found: Iterable[Any]) -> list[Tensor]:
    return [t for each in found for t in _listed(each) if isinstance(t, Tensor)]

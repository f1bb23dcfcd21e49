"""Which input dimensions are symbolic, what they are called, and the sizes to trace with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from hgc.errors import TraceError

DynamicSpec = Mapping[str, Mapping[int, str]]

_SEQUENCE_NAMES = ("s", "t", "u", "v", "w")
_MEANINGS = {"b": "batch", "s": "sequence"}


@dataclass(frozen=True)
class Dims:
    """``names[input][dim]`` is the dim's symbol name; ``hints`` are the user's example sizes, ``sizes`` those traced with."""

    names: dict[str, dict[int, str]]
    hints: dict[str, int]
    sizes: dict[str, int]

    def shape(self, name: str, example: Tensor) -> list[int]:
        """The shape of an input during tracing."""
        named = self.names.get(name, {})
        return [self.sizes[named[dim]] if dim in named else size for dim, size in enumerate(example.shape)]


def choose_dims(inputs: Mapping[str, Tensor], dynamic: DynamicSpec | None) -> Dims:
    """Name the symbolic dims: the user's choice, or batch and sequence by convention.

    Raises ``TraceError`` if ``dynamic`` names an input or dim that does not exist, or gives one name to dims of different sizes.
    """
    names = _by_convention(inputs) if dynamic is None else _by_user(inputs, dynamic)
    hints: dict[str, int] = {}
    for name, dims in names.items():
        for dim, symbol in dims.items():
            size = inputs[name].shape[dim]
            if hints.setdefault(symbol, size) != size:
                raise TraceError(
                    f"dynamic= gives the name {symbol!r} to dims of different sizes ({hints[symbol]}, and {size} in dim {dim} of "
                    f"{name!r}); use a name of its own for each size."
                )
    return Dims(names, hints, _tracing_sizes(hints))


def meaning(symbol: str, names: Mapping[str, Mapping[int, str]]) -> str:
    """What a symbol stands for, in words."""
    if symbol in _MEANINGS:
        return _MEANINGS[symbol]
    uses = [f"dim {dim} of {name}" for name, dims in names.items() for dim, found in dims.items() if found == symbol]
    return uses[0] if uses else symbol


def _by_user(inputs: Mapping[str, Tensor], dynamic: DynamicSpec) -> dict[str, dict[int, str]]:
    for name, dims in dynamic.items():
        if name not in inputs:
            raise TraceError(f"dynamic= names the input {name!r}, which example_inputs lacks; it has {', '.join(inputs)}.")
        for dim, symbol in dims.items():
            if not 0 <= dim < inputs[name].dim():
                raise TraceError(f"dynamic= names dim {dim} of {name!r}, which has {inputs[name].dim()} dims; count from 0.")
            if not isinstance(symbol, str) or not symbol.isidentifier():
                raise TraceError(f"dynamic= calls dim {dim} of {name!r} {symbol!r}; a dim's name must be an identifier such as 'b'.")
    return {name: dict(dims) for name, dims in dynamic.items()}


def _by_convention(inputs: Mapping[str, Tensor]) -> dict[str, dict[int, str]]:
    """Dim 0 is the batch ``b``; dim 1 of [batch, sequence] integers is ``s``, or ``t``, ``u``, ... where sizes differ."""
    batch: dict[int, str] = {}
    sequence: dict[int, str] = {}
    names: dict[str, dict[int, str]] = {}
    for name, tensor in inputs.items():
        if tensor.dim() == 0:
            continue
        size = tensor.shape[0]
        names[name] = {0: batch.setdefault(size, "b" if not batch else f"b{len(batch) + 1}")}
        integers = not tensor.is_floating_point() and not tensor.is_complex()
        if tensor.dim() == 2 and integers and len(sequence) < len(_SEQUENCE_NAMES):
            names[name][1] = sequence.setdefault(tensor.shape[1], _SEQUENCE_NAMES[len(sequence)])
    return names


def exact(dims: Dims) -> Dims:
    """Trace with the example's own sizes as far as they can be told apart."""
    return replace(dims, sizes=_distinct(dims.hints, lambda hint: max(hint, 2)))


def without(dims: Dims, labels: Iterable[str]) -> Dims:
    """The same with some dims static, at the example's size."""
    gone = set(labels)
    names = {name: {dim: label for dim, label in found.items() if label not in gone} for name, found in dims.names.items()}
    hints = {label: size for label, size in dims.hints.items() if label not in gone}
    return Dims(names, hints, {label: size for label, size in dims.sizes.items() if label not in gone})


def _tracing_sizes(hints: Mapping[str, int]) -> dict[str, int]:
    """Odd sizes near the example's: export pins a dim of size 1, equal sizes hide which dim is meant, even ones divide by chance."""
    return _distinct(hints, lambda hint: hint if hint % 2 and hint > 1 else max(hint - 1, 3))


def _distinct(hints: Mapping[str, int], start: Callable[[int], int]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for symbol, hint in sorted(hints.items(), key=lambda item: -item[1]):
        size = start(hint)
        while size in sizes.values():
            size += 2
        sizes[symbol] = size
    return sizes

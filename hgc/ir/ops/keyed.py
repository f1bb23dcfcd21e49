"""Dropout whose masks are those of one device: each element's fate follows from a key and its place in the global tensor.

A counter-based generator (splitmix64, https://doi.org/10.1145/2714064.2660195) is asked for the number of each element that a rank
holds, so that any sharding gives the same mask. Slower than the kernels' own dropout: about ten passes over the mask in 64-bit integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from hgc.ir.ops import groups
from hgc.ir.ops.layout import Order, Zigzag, take

Cut: TypeAlias = tuple[str, int, int | tuple[int, ...], bool]
"""Mesh axis, tensor dim, parts and whether they are in zigzag order, as in :func:`hgc.ir.ops.shard`; major axis first."""


def indices(local: int, dim: int, where: Sequence[Cut], device: torch.device) -> tuple[Tensor, int]:
    """Where the ``local`` elements along a dim are in the global tensor, and how long that is."""
    cuts = [cut for cut in where if cut[1] == dim]
    total = local * math.prod(groups.axis_size(axis) for axis, *_ in cuts)
    index = torch.arange(total, device=device)
    for axis, _, parts, in_zigzag in cuts:
        order: Order = Zigzag(parts) if in_zigzag and isinstance(parts, int) else parts
        index = take(index, 0, groups.axis_rank(axis), groups.axis_size(axis), order)
    return index, total


def factors(seed: int, places: Sequence[tuple[Tensor, int]], p: float, dtype: torch.dtype) -> Tensor:
    """What dropout multiplies elements by: ``1 / (1 - p)``, or zero with probability ``p``.

    ``places``: for each dim the global indices of the elements and the global size. ``seed``: the key, a 64-bit integer.
    """
    counter = torch.zeros((), dtype=torch.int64, device=places[0][0].device)
    for index, size in places:
        counter = counter.unsqueeze(-1) * size + index
    uniform = (_mixed(counter + seed) >> 40 & (1 << 24) - 1).to(torch.float32) / (1 << 24)
    return (uniform >= p).to(dtype) / (1 - p)


def _mixed(x: Tensor) -> Tensor:
    """splitmix64 of each element; products wrap around."""
    z = x * _signed(0x9E3779B97F4A7C15)
    z = (z ^ (z >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return z ^ (z >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


def dropped(x: Tensor, p: float, seed: int, where: Sequence[Cut]) -> Tensor:
    """``x`` with elements dropped by the key and their global place."""
    places = [indices(size, dim, where, x.device) for dim, size in enumerate(x.shape)]
    return x * factors(seed, places, p, x.dtype)

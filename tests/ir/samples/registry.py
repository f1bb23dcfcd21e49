"""Who makes a sample of which operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.ir.rule_harness import Sample

Option = TypeVar("Option")


class Draw:
    """What a sample is made of. Sizes are mostly multiples of ``ranks``, so that there is something to shard."""

    def __init__(self, draw: st.DrawFn, ranks: int, axes: tuple[str, ...]) -> None:
        self._draw, self.ranks, self.axes = draw, ranks, axes
        self.seed = 0

    def pick(self, *options: Option) -> Option:
        return self._draw(st.sampled_from(options))

    def some(self, probability: int = 2) -> bool:
        """True once in ``probability`` times."""
        return self.pick(*[True] + [False] * (probability - 1))

    def size(self) -> int:
        return self.pick(self.ranks, 2 * self.ranks, 1, 6, 5)

    def even(self) -> int:
        """A size that the axis divides."""
        return self.pick(self.ranks, 2 * self.ranks)

    def shape(self, low: int = 1, high: int = 3) -> list[int]:
        return [self.size() for _ in range(self.pick(*range(low, high + 1)))]

    def dim(self, rank: int) -> int:
        """A dim, counted from either end."""
        return self.pick(*range(-rank, rank))

    def real(self, *shape: int, grad: bool = True, low: float = -1.0) -> Tensor:
        """Distinct numbers between ``low`` and 1.1, far enough from each other that order is no accident."""
        self.seed += 1
        count = torch.Size(shape).numel()
        numbers = torch.randperm(count, generator=torch.Generator().manual_seed(self.seed)) + 0.3
        return (low + (1.1 - low) * numbers.double() / max(count, 1)).reshape(shape).requires_grad_(grad)

    def positive(self, *shape: int) -> Tensor:
        return self.real(*shape, low=0.1)

    def ints(self, high: int, *shape: int) -> Tensor:
        self.seed += 1
        return torch.randint(high, shape, generator=torch.Generator().manual_seed(self.seed))

    def flags(self, *shape: int) -> Tensor:
        return self.ints(2, *shape).bool()


Maker: TypeAlias = Callable[[Draw, Any], Sample]

SAMPLES: dict[Any, list[Maker]] = {}


def sample(*targets: Any) -> Callable[[Maker], Maker]:
    """Register ``make(draw, target)`` for some operators."""

    def register(make: Maker) -> Maker:
        for target in targets:
            SAMPLES.setdefault(target, []).append(make)
        return make

    return register

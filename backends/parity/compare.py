"""Differences between two outcomes, relative, with the name of the worst tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from torch import Tensor

from hgc.backends.parity.case import Outcome

FLOOR = 1e-3
"""A tensor's scale is at least this share of the largest tensor's (some gradients are zero in truth)."""

NOISE = 4.0
"""A gradient or weight that is mostly rounding (a convolution's bias in front of a batch norm) may be off by so many times what the
model's own is off from float64."""

# in bfloat16 a rounding that turns a ReLU on or off is a few per cent of a small model's gradient
LIMITS = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 1e-1, torch.float16: 5e-3}


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of one quantity, and where it is."""

    what: str
    value: float
    where: str


@dataclass(frozen=True)
class Report:
    """What ``verify`` found. ``ok`` is true if every difference is within ``limit`` and nothing is missing."""

    differences: tuple[Difference, ...]
    limit: float
    ranks: int
    strategy: str
    steps: int
    missing: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.missing and all(d.value <= self.limit for d in self.differences)

    @property
    def worst(self) -> float:
        return max(d.value for d in self.differences)

    def table(self) -> Table:
        table = Table(title=f"{self.strategy} on {self.ranks} processes against the model on one, {self.steps} steps")
        for column in ("quantity", "largest relative difference", "limit", "", "worst at"):
            table.add_column(column)
        for d in self.differences:
            table.add_row(d.what, f"{d.value:.2e}", f"{self.limit:.0e}", "ok" if d.value <= self.limit else "DIFFERS", d.where)
        return table

    def __str__(self) -> str:
        verdict = "equal" if self.ok else "DIFFERENT"
        parts = ", ".join(f"{d.what} {d.value:.1e}" for d in self.differences)
        lost = f"; missing: {', '.join(self.missing)}" if self.missing else ""
        return f"{verdict} ({parts}; limit {self.limit:.0e}){lost}"


def compare(
    expected: Outcome,
    found: Outcome,
    dtype: torch.dtype,
    ranks: int,
    strategy: str,
    truth: Mapping[str, Tensor] | None = None,
    state: Mapping[str, Tensor] | None = None,
) -> Report:
    """Relative differences. ``truth``, ``state``: the reference's gradients and last weights in float64, which show how far rounding alone
    takes each of them."""
    noise = _noise(truth or {}, expected.gradients)
    drift = _noise(_floating(state or {}), expected.state)
    losses = [abs(a - b) / max(abs(a), 1e-30) for a, b in zip(expected.losses, found.losses, strict=True)]
    finite = [x if x == x else float("inf") for x in losses]
    differences = (
        Difference("loss", finite[0], "step 1"),
        Difference("losses of all steps", max(finite), f"step {finite.index(max(finite)) + 1}"),
        _worst("gradients", expected.gradients, found.gradients, noise, LIMITS[dtype]),
        _worst("weights after the last step", _floating(expected.state), _floating(found.state), drift, LIMITS[dtype]),
    )
    lost = [f"gradient of {n}" for n in expected.gradients if n not in found.gradients]
    lost += [n for n in expected.state if n not in found.state]
    return Report(differences, LIMITS[dtype], ranks, strategy, len(losses), tuple(lost))


def _noise(truth: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: _difference(tensor, expected[name]) for name, tensor in truth.items() if name in expected}


def _floating(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in tensors.items() if t.is_floating_point()}


def _worst(what: str, expected: Mapping[str, Tensor], found: Mapping[str, Tensor], noise: Mapping[str, float], limit: float) -> Difference:
    common = [name for name in expected if name in found and expected[name].numel()]
    largest = max((float(expected[name].abs().max()) for name in common), default=0.0)
    worst, where = 0.0, "-"
    for name in common:
        scale = max(float(expected[name].abs().max()), FLOOR * largest, NOISE * noise.get(name, 0.0) / limit, 1e-30)
        difference = _difference(expected[name], found[name]) / scale
        if not difference <= worst:
            worst, where = difference if difference == difference else float("inf"), name
    return Difference(what, worst, where)


def _difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())

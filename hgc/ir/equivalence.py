"""A numerical check for transforms that replace operators: the changed bodies, run on random numbers before and after."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hgc.errors import VerifyError
from hgc.ir.program import Program
from hgc.ir.value import Value, info

_LIMIT_BYTES = 256 << 20
_TOLERANCE = 1e-9


def check_same_numbers(before: Program, after: Program, by: str) -> list[str]:
    """Compare every body that a transform changed with what it was, in float64 on small random inputs.

    Returns sentences for bodies that cannot be checked in this way (integer inputs, too large). Raises
    :class:`~hgc.errors.VerifyError` naming the pass and the body if numbers differ.
    """
    notes: list[str] = []
    seen: set[tuple[str, str]] = set()
    blocks = list(before.blocks()), list(after.blocks())
    if [b.path for b in blocks[0]] != [b.path for b in blocks[1]]:
        return [f"pass {by!r} changed the blocks themselves; their numbers were not compared"]
    for old, new in zip(*blocks, strict=True):
        if (old.body, new.body) not in seen:
            seen.add((old.body, new.body))
            note = _compare(before.body(old.body), after.body(new.body), before, by, new.body)
            notes.extend([note] if note else [])
    return notes


def _compare(old: fx.GraphModule, new: fx.GraphModule, program: Program, by: str, name: str) -> str:
    if str(old.graph) == str(new.graph):
        return ""
    inputs = _random_inputs(old, {symbol: 4 + 2 * i for i, symbol in enumerate(program.symbols)})
    if inputs is None:
        return f"pass {by!r} changed {name}, whose inputs are integers or large: its numbers were not compared"
    torch.manual_seed(0)
    expected = old(*inputs)
    torch.manual_seed(0)
    found = new(*inputs)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        if a.shape != b.shape:
            raise VerifyError(f"pass {by!r} changed the shape of output {i} of {name} from {tuple(a.shape)} to {tuple(b.shape)}")
        difference = float((a - b).abs().max() / a.abs().max().clamp_min(1e-30)) if a.numel() else 0.0
        if not difference <= _TOLERANCE:
            raise VerifyError(f"pass {by!r} changed what {name} computes: output {i} differs by {difference:.1e} (limit {_TOLERANCE:.0e})")
    return ""


def _random_inputs(body: fx.GraphModule, sizes: dict[sympy.Symbol, int]) -> list[Tensor] | None:
    generator = torch.Generator().manual_seed(0)
    made: list[Tensor] = []
    total = 0
    for node in body.graph.nodes:
        if node.op == "placeholder":
            value: Any = info(node).value
            assert isinstance(value, Value)
            shape = [int(size.subs(sizes)) for size in value.shape]
            total += 8 * int(torch.Size(shape).numel())
            if not value.dtype.is_floating_point or total > _LIMIT_BYTES:
                return None
            made.append(torch.randn(shape, generator=generator, dtype=torch.float64))
    return made

"""Programs as text: short for deep models, complete in the bodies."""

from __future__ import annotations

import pytest

from hgc import trace
from hgc.ir.placement import Partial, Shard
from hgc.ir.printing import format_program
from hgc.ir.program import Program
from hgc.ir.value import info, set_info, value
from tests.tracing.small import Layer, Stack, ids


@pytest.fixture
def program() -> Program:
    return trace(Stack([Layer() for _ in range(40)]), ids())


def test_equal_blocks_are_one_line(program: Program) -> None:
    text = str(program)
    assert "layers.0-39 x40: Layer(x, 4 weights) -> f32[b, s, 16]" in text
    assert text.count("layer_norm(") == 1
    assert "Layer (called 40 times)" in text
    assert "b = batch, at least 1, traced with 3" in text
    assert len(text.splitlines()) < 60


def test_one_body_alone(program: Program) -> None:
    text = format_program(program, expand="Layer")
    assert text.startswith("Layer (called 40 times)")
    assert "lin = linear(norm, lin_weight, lin_bias)  # f32[b, s, 16]  lin" in text
    assert "Head" not in text


def test_placements_are_shown(program: Program) -> None:
    from dataclasses import replace

    program.mesh["tp"] = 4
    node = next(n for n in program.body("Layer").graph.nodes if n.name == "lin")
    set_info(node, replace(info(node), value=value(node).placed("tp", Shard(2))))
    assert "f32[b, s, 16] local [b, s, 4] {tp:S(2)}" in format_program(program, expand="Layer")
    set_info(node, replace(info(node), value=replace(value(node), placements=(("tp", Partial()),))))
    assert "{tp:P}" in format_program(program, expand="Layer")

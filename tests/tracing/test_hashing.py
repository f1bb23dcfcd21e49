"""Hashes are equal for equal programs, in every process, and differ where the program differs."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import nn

from hgc import trace
from hgc.ir.hashing import body_hash, program_hash
from tests.tracing.small import Layer, Stack, ids

_SCRIPT = """
from hgc.ir.hashing import program_hash
from hgc import trace
from tests.tracing.small import Layer, Stack, ids
print(program_hash(trace(Stack([Layer() for _ in range(3)]), ids(2, 6))))
"""


def _program(layers: int = 3, width: int = 16, b: int = 3) -> str:
    return program_hash(trace(Stack([Layer(width) for _ in range(layers)], width=width), ids(b, 5)))


def test_same_in_another_process() -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT], capture_output=True, text=True, check=True, env=None)
    assert done.stdout.strip() == _program()


def test_example_sizes_and_weights_do_not_count() -> None:
    torch.manual_seed(1)
    assert _program(b=3) == _program(b=7)


@pytest.mark.parametrize("other", [{"layers": 4}, {"width": 8}])
def test_models_count(other: dict[str, int]) -> None:
    assert _program() != _program(**other)


def test_node_names_do_not_count() -> None:
    program = trace(Stack([Layer() for _ in range(3)]), ids())
    before, body = program_hash(program), program.body("Layer")
    whole = body_hash(body)
    for number, node in enumerate(reversed(list(body.graph.nodes))):
        node.name = f"n{number}"
    assert body_hash(body) == whole
    assert program_hash(program) == before
    next(node for node in body.graph.nodes if node.op == "call_function").kwargs = {"eps": 1.0}
    assert program_hash(program) != before


def test_options_count() -> None:
    model = Stack([Layer() for _ in range(3)])
    assert program_hash(trace(model, ids())) != program_hash(trace(model, ids(), dynamic={}))
    frozen = Stack([Layer() for _ in range(3)])
    nn.Module.requires_grad_(frozen.head, False)
    assert program_hash(trace(model, ids())) != program_hash(trace(frozen, ids()))

"""Costs of every model of the zoo against what torch counts and keeps in real runs, at several sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hgc.cost.symbolic import exact
from hgc.errors import TraceError
from hgc.ir.input_sizes import input_sizes
from hgc.passes.analysis.costs import BlockCosts
from hgc.tools.bench import zoo
from hgc.tracing import trace
from tests.cost.small import as_on_gpu, gpu_functions, kept_bytes, state_of

pytestmark = pytest.mark.slow
NAMES = [entry.name for entry in zoo.entries()]


@pytest.mark.parametrize("name", NAMES)
def test_counted_values(name: str) -> None:
    """FLOPs of forward and backward, and bytes that autograd keeps, of the program on real tensors."""
    torch.manual_seed(0)
    entry = zoo.find(name)
    model: Any = entry.build("small")
    length = entry.minimum + 3 * entry.step
    try:
        program = trace(model, entry.batch(4, length), loss=entry.loss)
    except TraceError as refused:
        pytest.skip(str(refused))
    found = BlockCosts().run(program)
    changed, state = as_on_gpu(program), state_of(model)
    any_batch = any(symbol.meaning == "batch" for symbol in program.symbols.values())
    for b, steps in ((2, 2), (3, 4), (5, 3)) if any_batch else ((4, 2), (4, 4)):
        batch = {key: t for key, t in entry.batch(b, entry.minimum + steps * entry.step).items() if key in _inputs(program)}
        sizes = input_sizes(program, batch)
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
            loss = changed.run(batch, state)
            forward = counter.get_total_flops()
            loss.backward()
            both = counter.get_total_flops()
        assert (exact(found.forward_flops, sizes), exact(found.backward_flops, sizes)) == (forward, both - forward)
        with gpu_functions():
            kept = kept_bytes(lambda batch=batch: changed.run(batch, state), {**state, **batch})
        assert exact(found.saved_bytes, sizes) == kept


def _inputs(program: Any) -> set[str]:
    return {str(node.target) for node in program.inputs()}

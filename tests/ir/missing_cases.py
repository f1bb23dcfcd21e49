"""What the table lacks: placements of an operator's inputs under which its plain local run is a legal placement of the output.

A report, not a test: ``python -m tests.ir.missing_cases [operator ...]``. A combination that holds for one sample by accident is listed
too, so each line needs thought before it becomes a rule.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import fx

from hgc.ir.placement import Invariant, Partial, Placement, Shard
from hgc.ir.rules import cases, make_call
from hgc.ir.sizes import rebuild_sizes
from hgc.ir.value import info, set_info
from tests.ir.rule_harness import Proof, Single, _call, _record, joined, single_device, spread
from tests.ir.samples import SAMPLES, Draw

RANKS = 2
MESH = {"ax": RANKS}
COMMON = """
add.Tensor mul.Tensor linear matmul bmm embedding layer_norm rms_norm softmax.int gelu cat stack
split_with_sizes chunk slice.Tensor select.int transpose.int permute reshape expand unsqueeze squeeze.dim
mean.dim sum.dim_IntList amax topk sort gather index_select index.Tensor scatter.src conv1d conv2d max_pool2d
group_norm one_hot cumsum pad repeat_interleave.self_int where.self masked_fill.Scalar einsum
cross_entropy_loss attention grouped_linear
""".split()


def name(target: Any) -> str:
    return str(target).removeprefix("aten.").removesuffix(".default") if hasattr(target, "_schema") else str(target.__name__)


def missing(single: Single) -> Iterator[str]:
    """Legal combinations of plain shards and whole values that no case offers."""
    if any(symbol for symbol in single.sample.symbols):
        return
    offered = {(c.inputs, c.outputs) for c in cases(make_call(single.node, "ax", MESH, {}))}
    choices = [_placements(t) for t in single.operands.values()]
    for inputs in itertools.product(*choices):
        if all(p == Invariant() for p in inputs):
            continue
        for outputs in itertools.product(*([*_placements(o), Partial()] for o in single.outputs)):
            if (inputs, outputs) not in offered and _holds(single, inputs, outputs):
                yield f"({', '.join(map(str, inputs))}) -> {', '.join(map(str, outputs))}"


def _placements(tensor: torch.Tensor) -> list[Placement]:
    return [Invariant(), *(Shard(dim) for dim, size in enumerate(tensor.shape) if size % RANKS == 0 and size >= RANKS)]


def _holds(single: Single, inputs: tuple[Placement, ...], outputs: tuple[Placement, ...]) -> bool:
    placed = dict(zip(single.operands, inputs, strict=True))
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for old in single.node.graph.nodes:
        copies[old] = graph.node_copy(old, copies.__getitem__)
        set_info(copies[old], replace(info(old)))
    proof = Proof(copies[single.node], {n: (p,) for n, p in placed.items()}, tuple((p,) for p in outputs))
    _record(proof, MESH)
    try:
        rebuild_sizes(graph, MESH, "ax")
        shards = {n: spread(t.detach(), (placed[n],), [RANKS], {}) for n, t in single.operands.items()}
        ranks = [_call(proof.node, {n: t[rank].clone() for n, t in shards.items()})[0] for rank in range(RANKS)]
        for position, expected in enumerate(single.outputs):
            found = joined([r[position] for r in ranks], (outputs[position],), [RANKS], {}, "")
            if found.shape != expected.shape or not torch.allclose(found, expected.detach(), equal_nan=True):
                return False
    except Exception:
        return False  # whatever it is that does not run is not legal
    return True


def report(target: Any, samples: int = 12) -> Counter[str]:
    """How many samples allow what the table lacks."""
    found: Counter[str] = Counter()

    @settings(derandomize=True, deadline=None, database=None, max_examples=samples, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def collect(data: st.DataObject) -> None:
        make = data.draw(st.sampled_from(SAMPLES[target]))
        found.update(set(missing(single_device(make(Draw(data.draw, RANKS, ("ax",)), target)))))

    collect()
    return found


if __name__ == "__main__":
    wanted = sys.argv[1:] or COMMON
    for target in SAMPLES:
        if name(target) in wanted:
            for line, count in report(target).most_common():
                print(f"{name(target):24} {line}   ({count} samples)")

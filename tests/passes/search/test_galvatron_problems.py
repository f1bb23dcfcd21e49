"""The production solver on problems like Galvatron's: the gap to the exact dynamic programme, and the gap that it proves itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from hgc.passes.sharding.search.exact import solve_exact
from hgc.passes.sharding.search.problem import Chain
from hgc.passes.sharding.search.solve import solve
from hgc.tools.bench.search_problems import layer, problem, rounded

STEPS = 800
"""Of memory, so that the dynamic programme is exact on rounded numbers."""


def _chains() -> Iterator[Chain]:
    """BERT-Huge, ViT-Huge and GPT-6.7B with layers alike, and with dearer ones at the end; tight to loose limits."""
    for hidden, sequence, flops in ((1280, 512, 6e12), (1280, 196, 6e12), (4096, 2048, 1e14)):
        usual, dear = layer(hidden, sequence, flops), layer(hidden, sequence, flops, ratio=1.7)
        for layers in ((usual,) * 32, (usual,) * 16 + (dear,) * 16):
            for stages, micro_batches in ((1, 1), (1, 8), (2, 4), (4, 4)):
                chain = problem(layers, 8, stages, 64, micro_batches, 0.0).chain(0, 0, 32 // stages)
                for share in (0.1, 0.5):
                    yield rounded(chain, share, STEPS)


def test_gaps() -> None:
    gaps, proven, mixed = [], [], 0
    for chain in _chains():
        wanted, found = solve_exact(chain), solve(chain)
        assert (wanted is None) == (found is None)
        if wanted is not None and found is not None:
            gaps.append(found.time_s / wanted.time_s - 1)
            proven.append(found.gap)
            assert found.lower_bound_s <= wanted.time_s * (1 + 1e-9)
            assert found.memory <= chain.limit
            mixed += len(set(found.choices)) > 1
    assert len(gaps) >= 40
    assert mixed > len(gaps) / 2, "problems in which memory binds"
    assert float(np.median(gaps)) <= 0.005
    assert max(gaps) <= 0.01
    assert float(np.median(proven)) <= 0.005
    assert max(proven) <= 0.01

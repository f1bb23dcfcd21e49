"""Kernels of operators, chains that run as one, and the dtypes that they run in."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc.cost.dtypes import dtypes_of
from hgc.cost.execution import EAGER, Execution
from hgc.cost.fusion import chains, fused_kept, fused_work
from hgc.cost.kernels import Product
from hgc.cost.min_cut import cheapest_separation
from hgc.cost.symbolic import BodyCost, NodeCost
from hgc.passes.analysis.costs import BlockCosts
from hgc.plan import Precision
from hgc.runtime.precision import read_precision
from hgc.tracing import trace
from tests.cost.small import costs, lowered, lowered_costs, traced


class Gated(nn.Module):
    """A layer norm, a gated product, dropout and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.gate, self.up, self.down = nn.Linear(32, 64), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = F.silu(self.gate(y)) * self.up(y)
        return (x + F.dropout(self.down(y), 0.1)).square().mean()


@cache
def gated() -> BodyCost:
    found = BlockCosts().run(trace(Gated(), {"x": torch.randn(4, 16, 32)}, dynamic={"x": {0: "b", 1: "s"}}))
    (body,) = found.bodies.values()
    return body


def node(body: BodyCost, name: str) -> NodeCost:
    return next(each for each in body.nodes if each.name == name)


def test_products_of_a_linear_layer() -> None:
    layer = costs("llama").bodies["LlamaDecoderLayer"]
    b, s = costs("llama").symbols
    found = node(layer, "gate_proj")
    assert found.forward.products == (Product(1, b * s, 128, 64, torch.float32, linear=True),)
    assert found.backward_input.products == (Product(1, b * s, 64, 128, torch.float32, linear=True),)
    assert found.backward_weight.products == (Product(1, 128, 64, b * s, torch.float32, linear=True),)
    (attention,) = node(layer, "attention").forward.attentions
    assert (attention.batch, attention.heads, attention.queries, attention.keys, attention.head_dim) == (b, 8, s, s, 8)
    assert attention.causal
    assert [each.backward for each in node(layer, "attention").backward_input.attentions] == [True]
    assert not node(layer, "attention").forward.products


def test_products_of_experts_are_one_kernel() -> None:
    body = next(body for body in costs("mixtral").bodies.values() if "DecoderLayer" in body.name)
    b, s = costs("mixtral").symbols
    found = node(body, "grouped_linear")
    (product,) = found.forward.products
    assert (product.batch, product.m, product.k) == (4, b * s / 2, 64)
    (for_rows,), (for_weights,) = found.backward_input.products, found.backward_weight.products
    assert (for_rows.batch, for_rows.n, for_weights.k) == (4, 64, b * s / 2)


@pytest.mark.parametrize("family", ["llama", "gpt2", "cnn", "t5"])
def test_products_have_all_flops(family: str) -> None:
    """A multiply-add is two; attention is counted on its own."""
    for body in costs(family).bodies.values():
        for each in body.nodes:
            if each.forward.attentions:
                continue
            pairs = (
                (each.forward_flops, each.forward.products),
                (each.backward_flops, each.backward_input.products + each.backward_weight.products),
            )
            for flops, products in pairs:
                assert flops - 2 * sum(p.batch * p.m * p.n * p.k for p in products) == 0


def test_views_run_nothing_and_lookups_read_rows() -> None:
    layer, embeddings = costs("llama").bodies["LlamaDecoderLayer"], costs("llama").bodies["Embeddings"]
    b, s = costs("llama").symbols
    assert node(layer, "transpose").forward.moves == 0
    assert node(layer, "add_3").forward.moved_bytes == 3 * 256 * b * s
    assert node(embeddings, "embed_tokens").forward.moved_bytes == (2 * 256 + 8) * b * s


def test_chains_end_at_products() -> None:
    body = gated()
    names = [{each.name for each in chain} for chain in chains(body)]
    (silu,) = (chain for chain in names if "silu" in chain)
    assert silu == {"silu", "mul"}
    (last,) = (chain for chain in names if "dropout" in chain)
    assert {"dropout", "add", "mean"} <= last


def test_a_fused_chain_moves_what_enters_and_leaves() -> None:
    body = gated()
    b, s = sorted(body.hints, key=str)
    wide = 4 * 64 * b * s
    (work,) = (work for work in fused_work(body) if "silu" in work.nodes)
    assert work.forward.moved_bytes == 3 * wide
    assert work.backward_input.moved_bytes == 5 * wide  # a gradient, the two factors, and their gradients
    assert (work.forward.moves, work.backward_input.moves) == (1, 1)


def test_a_fused_chain_keeps_what_it_is_rebuilt_from() -> None:
    kept = fused_kept(gated())
    assert {"gate", "up", "mul"} <= kept.keys()  # the product needs the result, its factors give everything else
    assert "silu" not in kept
    assert any(memory.startswith("dropout:") for memory in kept)  # random numbers do not come again
    assert "norm" in kept


@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_fused_chains_keep_no_more(family: str) -> None:
    for body in (*costs(family).bodies.values(), *lowered_costs(family, "dp2 tp2").bodies.values()):
        inputs = {found.memory for found in body.inputs}
        fused = sum(size for memory, size in fused_kept(body).items() if memory not in inputs)
        difference = (body.saved_bytes - fused).subs(dict.fromkeys(body.hints, 16))
        assert difference >= 0


def test_the_cheapest_separation_by_trying_all() -> None:
    edges = [("a", "c"), ("b", "c"), ("b", "d"), ("c", "e"), ("d", "e"), ("d", "f"), ("c", "f")]
    for seed in range(20):
        numbers = torch.randint(0, 10, (6,), generator=torch.Generator().manual_seed(seed)).tolist()
        price = {name: float(number) for name, number in zip("abcdef", numbers, strict=True)}
        found = cheapest_separation(price, edges, "ab", "ef")
        subsets = (set(chosen) for count in range(7) for chosen in itertools.combinations("abcdef", count))
        best = min(sum(price[name] for name in chosen) for chosen in subsets if _separates(chosen, edges))
        assert _separates(set(found), edges)
        assert sum(price[name] for name in found) == best


def _separates(chosen: set[str], edges: list[tuple[str, str]]) -> bool:
    reached = {"a", "b"} - chosen
    for _ in range(6):
        reached |= {head for tail, head in edges if tail in reached and head not in chosen}
    return not reached & {"e", "f"}


RUNNABLE = [
    Precision(),
    Precision(parameters="bfloat16"),
    Precision(compute="bfloat16"),
    Precision(compute="bfloat16", parameters="float32", gradients="bfloat16"),
    Precision(compute="bfloat16", parameters="bfloat16", master="float32"),
    Precision(parameters="float64"),
    Precision(compute="float64"),
]


@pytest.mark.parametrize("precision", RUNNABLE, ids=str)
def test_dtypes_are_those_of_the_runtime(precision: Precision) -> None:
    real, found = read_precision(precision), dtypes_of(precision, EAGER)
    assert (found.autocast, found.other(torch.float32)) == (real.autocast, real.other(torch.float32))
    for dims in (1, 2):
        for what in ("kept", "stored", "summed"):
            assert getattr(found, what)(torch.float32, dims) == getattr(real, what)(torch.float32, dims)


def test_autocast_computes_products_in_16_bits_and_keeps_their_casts() -> None:
    program = traced("llama")[1]
    layer = BlockCosts(Precision(compute="bfloat16", parameters="float32")).run(program).bodies["LlamaDecoderLayer"]
    projection = node(layer, "q_proj")
    assert {product.dtype for product in (*projection.forward.products, *projection.backward_weight.products)} == {torch.bfloat16}
    assert 2 * 64 * 64 in [need.bytes for need in projection.needs]  # the weight, cast
    assert layer.outputs[0].dtype == torch.float32
    whole = BlockCosts(Precision(parameters="bfloat16"), Execution(autocast=False)).run(program)
    assert node(whole.bodies["LlamaDecoderLayer"], "q_proj").forward.products[0].dtype == torch.bfloat16
    gathered = BlockCosts(Precision(compute="bfloat16", parameters="float32"), zero=3).run(lowered("llama", "dp2 zero3")[0])
    layer = gathered.bodies["LlamaDecoderLayer"]
    assert 2 * 64 * 64 not in [need.bytes for need in node(layer, "q_proj").needs if need.memory.startswith("q_proj:")]

"""Costs in parallel degrees: one expression for all degrees, where there is one."""

from __future__ import annotations

from functools import cache

import pytest
import sympy

from hgc.compiler import distribute
from hgc.cost.degrees import in_degree
from hgc.cost.symbolic import ProgramCosts
from hgc.errors import HgcError
from hgc.ir.program import Program
from hgc.passes.analysis.costs import BlockCosts
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tracing import trace
from tests import families
from tests.cost.small import lowered_costs


@cache
def llama() -> Program:
    """With as many key-value heads as heads, so that sixteen ranks divide them."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=16, num_key_value_heads=16, intermediate_size=128, vocab_size=256
    )
    ids = families.token_ids(16, 16)
    return trace(transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids})


def costs(strategy: Strategy) -> ProgramCosts:
    return BlockCosts().run(distribute(llama(), Plan(strategy)))


def test_every_total_in_the_degree_of_tensor_parallelism() -> None:
    found = {size: costs(Strategy(tp=size)).expressions() for size in (2, 4, 8, 16)}
    tp, b, s = sympy.Symbol("tp"), *costs(Strategy(tp=2)).symbols
    in_tp = {name: in_degree({size: each[name] for size, each in found.items()}, tp) for name in found[2]}
    for name, expression in in_tp.items():
        assert sympy.expand(expression.subs(tp, 4) - found[4][name]) == 0
    products = 2 * b * s * 64 * (2 * (4 * 64 + 3 * 128) + 256)
    attention = 4 * b * s**2 * 64 * 2
    assert sympy.expand(in_tp["forward_flops"] - (products + attention) / tp) == 0
    assert (
        in_tp["all_gather_tp_forward_bytes"] == 5 * 256 * b * s + 3 * 4 * b * s * tp
    )  # whole activations, three numbers of each rank's softmax


def test_data_parallelism_divides_the_batch() -> None:
    dp = sympy.Symbol("dp")
    found = {size: costs(Strategy(dp=size)) for size in (2, 4, 8, 16)}
    saved = in_degree({size: each.saved_bytes for size, each in found.items()}, dp)
    b, s = found[2].symbols
    assert saved.coeff(b * s) == BlockCosts().run(llama()).saved_bytes.coeff(b * s) / dp != 0


def test_where_there_is_no_such_expression() -> None:
    tp = sympy.Symbol("tp")
    with pytest.raises(HgcError, match="needs costs at 4 degrees or more and got 1"):
        in_degree({2: lowered_costs("llama", "tp2").forward_flops}, tp)
    b = sympy.Symbol("b")
    with pytest.raises(HgcError, match="the coefficient of b is no simple function of tp"):
        in_degree({2: 10 * b, 4: 5 * b, 8: 4 * b, 16: 4 * b}, tp)  # a vocabulary padded to eight

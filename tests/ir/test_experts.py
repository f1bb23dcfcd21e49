"""Mixture of experts under sharded tokens: rows sorted by expert are no shard of anything, so the chain is proven as a whole."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import sympy
import torch
from torch import Tensor, fx
from torch.nn import functional as F

from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.derive import derive
from hgc.ir.ops.layout import Parts, join, take
from hgc.ir.ops.moe import grouped_linear, moe_combine, moe_dispatch
from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard, parse_placement
from hgc.ir.rules import Case, cases, make_call
from hgc.ir.rules.by_expert import is_by_expert, is_order, order_of, rows_of, tokens_of
from hgc.ir.value import Info, Value, set_info

TOKENS, WIDTH, EXPERTS, CHOICES = 8, 4, 3, 2
B = sympy.Symbol("B", integer=True, positive=True)
aten = torch.ops.aten


def mixture(x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, bias: Tensor, down: Tensor) -> Tensor:
    """As gpt-oss has it: dispatch, products with a bias for each expert, an activation, combine."""
    rows, offsets, order = moe_dispatch(x, experts, EXPERTS)
    of_row = experts.reshape(-1)[order]
    inner = F.silu(grouped_linear(rows, up, offsets, False) + bias[of_row])
    return moe_combine(grouped_linear(inner, down, offsets, True), order, weights)


def operands() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)

    def real(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    chosen = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOICES] for _ in range(TOKENS)])
    return [real(TOKENS, WIDTH), chosen, real(TOKENS, CHOICES), real(EXPERTS, 6, WIDTH), real(EXPERTS, 6), real(EXPERTS, 6, WIDTH)]


def with_gradients(inputs: list[Tensor], grad: Tensor) -> tuple[Tensor, list[Tensor]]:
    leaves = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    out = mixture(*leaves)
    return out.detach(), list(torch.autograd.grad(out, [t for t in leaves if t.requires_grad], grad))


@pytest.mark.parametrize("parts", [1, 2, (6, 2)])
def test_every_rank_does_the_experts_of_its_own_tokens(parts: Parts) -> None:
    """Tokens sharded in any way: outputs and gradients of tokens are shards, those of the experts' matrices are summands."""
    inputs, grad = operands(), torch.randn(TOKENS, WIDTH, dtype=torch.float64)
    out, expected = with_gradients(inputs, grad)

    def rank_main(rank: int) -> tuple[Tensor, list[Tensor]]:
        with ops.use(mesh_groups({"dp": 2})):
            local = [take(t, 0, rank, 2, parts).contiguous() if i < 3 else t for i, t in enumerate(inputs)]
            return with_gradients(local, take(grad, 0, rank, 2, parts))

    ranks = run_ranks(2, rank_main)
    torch.testing.assert_close(join(torch.stack([r[0] for r in ranks]), 0, parts), out)
    for index, gradient in enumerate(expected):
        locals_ = torch.stack([r[1][index] for r in ranks])
        torch.testing.assert_close(join(locals_, 0, parts) if index < 2 else locals_.sum(0), gradient)


class Graph:
    """Nodes of a mixture of experts with what tracing knows about them."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.place("x", (TOKENS, WIDTH))
        self.experts = self.place("experts", (TOKENS, CHOICES), torch.int64)
        self.weights = self.place("weights", (TOKENS, CHOICES))
        self.up = self.place("up", (EXPERTS, WIDTH, WIDTH))

    def place(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> fx.Node:
        node = self.graph.placeholder(name)
        set_info(node, Info(value(shape, dtype), role="input"))
        return node

    def call(self, target: Callable[..., object], *args: object, like: Value | tuple[Value, ...]) -> fx.Node:
        node = self.graph.call_function(target, args)  # type: ignore[arg-type]
        set_info(node, Info(like))
        return node

    def dispatch(self) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
        values = (value((TOKENS * CHOICES, WIDTH)), value((EXPERTS,), torch.int32), value((TOKENS * CHOICES,), torch.int64))
        node = self.call(moe_dispatch, self.x, self.experts, EXPERTS, like=values)
        rows, offsets, order = (self.call(operator.getitem, node, i, like=v) for i, v in enumerate(values))
        return node, rows, offsets, order

    def product(self, rows: fx.Node, offsets: fx.Node) -> fx.Node:
        return self.call(grouped_linear, rows, self.up, offsets, False, like=value((TOKENS * CHOICES, WIDTH)))

    def combine(self, rows: fx.Node, order: fx.Node) -> fx.Node:
        return self.call(moe_combine, rows, order, self.weights, like=value((TOKENS, WIDTH)))

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(aten.add.Tensor, a, b, like=value((TOKENS * CHOICES, WIDTH)))


def value(shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> Value:
    return Value(tuple(map(sympy.Integer, shape)), dtype, dtype.is_floating_point)


def offered(node: fx.Node, found: dict[fx.Node, Placement] | None = None) -> list[Case]:
    return list(cases(make_call(node, "dp", {"dp": 2}, {}, found)))


def shards_tokens(node: fx.Node) -> bool:
    return any(case.inputs == (Shard(0), Shard(0)) for case in offered(node))


def test_tokens_stay_sharded_up_to_the_combine() -> None:
    g = Graph()
    dispatch, rows, offsets, order = g.dispatch()
    product = g.product(rows, offsets)
    combine = g.combine(g.add(product, product), order)
    assert Case((Shard(0), Shard(0)), (rows_of(Shard(0)), Partial(), order_of(Shard(0)))) in offered(dispatch)
    found: dict[fx.Node, Placement] = {rows: rows_of(Shard(0)), offsets: Partial(), g.up: Replicated()}
    assert derive(product, make_call(product, "dp", {"dp": 2}, {}, found)) == (rows_of(Shard(0)),)
    found = {combine.args[0]: rows_of(Shard(0)), order: order_of(Shard(0)), g.weights: Shard(0)}  # type: ignore[dict-item]
    assert derive(combine, make_call(combine, "dp", {"dp": 2}, {}, found)) == (Shard(0),)


def test_weights_of_other_tokens_are_refused() -> None:
    g = Graph()
    _, rows, _, order = g.dispatch()
    combine = g.combine(rows, order)
    found: dict[fx.Node, Placement] = {rows: rows_of(Shard(0)), order: order_of(Shard(0)), g.weights: Shard(0, 2)}
    with pytest.raises(ShardingError, match="no rule for moe_combine"):
        derive(combine, make_call(combine, "dp", {"dp": 2}, {}, found))


def test_rows_that_go_elsewhere_are_not_sharded() -> None:
    g = Graph()
    dispatch, rows, offsets, order = g.dispatch()
    g.combine(g.product(rows, offsets), order)
    g.call(aten.sum.dim_IntList, rows, [0], like=value((WIDTH,)))
    assert not shards_tokens(dispatch)


def test_rows_of_two_dispatches_are_not_mixed() -> None:
    g = Graph()
    first, rows, offsets, order = g.dispatch()
    g.experts = g.place("others", (TOKENS, CHOICES), torch.int64)
    second, other_rows, _, _ = g.dispatch()
    g.combine(g.product(g.add(rows, other_rows), offsets), order)
    assert not shards_tokens(first)
    assert not shards_tokens(second)


def test_no_arithmetic_with_the_order() -> None:
    """It counts a rank's own tokens, so a global number added to it would be wrong."""
    g = Graph()
    _, _, _, order = g.dispatch()
    shifted = g.call(aten.add.Tensor, order, 1, like=value((TOKENS * CHOICES,), torch.int64))
    assert all(case.inputs != (order_of(Shard(0)),) for case in offered(shifted, {order: order_of(Shard(0))}))


@pytest.mark.parametrize("tokens", [Shard(0), Shard(0, 2), Shard(0, (6, 2)), Shard(0, B)])
def test_markers_are_read_back(tokens: Shard) -> None:
    assert tokens_of(rows_of(tokens)) == tokens_of(order_of(tokens)) == tokens
    assert is_by_expert(rows_of(tokens))
    assert is_by_expert(order_of(tokens))
    assert is_order(order_of(tokens))
    assert not is_order(rows_of(tokens))
    assert not is_by_expert(tokens)
    if tokens.parts != B:
        assert parse_placement(str(rows_of(tokens))) == rows_of(tokens)


def test_whole_values_are_no_markers() -> None:
    assert not any(is_by_expert(p) or is_order(p) for p in (Invariant(), Replicated(), Partial()))

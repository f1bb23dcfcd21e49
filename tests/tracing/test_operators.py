"""The operators that tracing puts in: attention and mixture of experts, against definitions written out."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc import trace
from hgc.ir.ops.attention import attention
from hgc.ir.ops.moe import grouped_linear, moe_combine, moe_dispatch
from tests.tracing.small import Step


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, causal: bool, window: int, scale: float, softcap: float
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    scores = torch.einsum("bhsd,bhtd->bhst", q, k.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    rows, columns = torch.meshgrid(torch.arange(q.shape[2]), torch.arange(k.shape[2]), indexing="ij")
    seen = torch.ones_like(rows, dtype=torch.bool)
    seen = seen & (columns <= rows) if causal else seen
    seen = seen & (columns > rows - window) if window else seen
    if bias is not None:
        scores = scores.masked_fill(~bias, -math.inf) if bias.dtype == torch.bool else scores + bias
    scores = scores.masked_fill(~seen, -math.inf)
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True) + (0 if sinks is None else sinks.exp().view(1, -1, 1, 1))
    return torch.einsum("bhst,bhtd->bhsd", weights / total, v.repeat_interleave(group, 1))


@pytest.mark.parametrize("bias", ["none", "bool", "float"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 2.0), (3, 2.0), (50, 0.0)])
def test_attention(bias: str, sinks: bool, causal: bool, window: int, softcap: float) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, 6, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    extra = {
        "none": None,
        "bool": (torch.rand(2, 1, 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool),
        "float": torch.randn(1, 4, 6, 6, dtype=torch.float64, requires_grad=True),
    }[bias]
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True) if sinks else None
    arguments = (q, k, v, extra, sink, causal, window, 0.3, softcap)
    found, expected = attention(*arguments, 0.0), _written_out(*arguments)
    torch.testing.assert_close(found, expected)
    leaves = [x for x in (q, k, v, extra, sink) if x is not None and x.requires_grad]
    cotangent = torch.randn_like(found)
    for a, b in zip(torch.autograd.grad(found, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_attention_dropout_keeps_the_mean(softcap: float) -> None:
    torch.manual_seed(0)
    q, k = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    v = torch.ones(1, 1, 4, 8)
    mean = torch.stack([attention(q, k, v, None, None, False, 0, 0.3, softcap, 0.5) for _ in range(2000)]).mean()
    assert abs(float(mean) - 1) < 0.05


@pytest.mark.parametrize("transposed", [False, True])
def test_mixture_of_experts(transposed: bool) -> None:
    torch.manual_seed(0)
    tokens, chosen, experts, width, inner = 7, 2, 5, 4, 6
    x = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    w = torch.randn(experts, inner, width, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(tokens, chosen, dtype=torch.float64, requires_grad=True)
    choice = torch.stack([torch.randperm(experts - 1)[:chosen] for _ in range(tokens)])  # the last expert gets no token
    rows, offsets, order = moe_dispatch(x, choice, experts)
    products = grouped_linear(rows, w.transpose(1, 2).contiguous() if transposed else w, offsets, transposed)
    found = moe_combine(products, order, weights)
    expected = torch.stack([sum(weights[t, c] * w[choice[t, c]] @ x[t] for c in range(chosen)) for t in range(tokens)])  # type: ignore[misc]
    torch.testing.assert_close(found, expected)
    cotangent = torch.randn_like(found)
    leaves = [x, w, weights]
    for a, b in zip(torch.autograd.grad(found, leaves, cotangent), torch.autograd.grad(expected, leaves, cotangent), strict=True):
        torch.testing.assert_close(a, b)
    assert offsets.dtype == torch.int32
    assert int(offsets[-1]) == tokens * chosen


class _Attends(nn.Module):
    """Self attention with a mask made in the forward, in the ways that people make one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.qkv, self.kind = nn.Linear(8, 8 + 8 + 8), kind
        self.register_buffer("table", torch.ones(32, 32, dtype=torch.bool).tril(), persistent=False)

    def mask(self, s: int) -> Tensor | None:
        match self.kind:
            case "tril":
                return torch.ones(s, s, dtype=torch.bool).tril()
            case "triu":
                return torch.full((s, s), -math.inf).triu(1)
            case "compare":
                return torch.arange(s)[:, None] >= torch.arange(s)
            case "table":
                table = self.table
                assert isinstance(table, Tensor)
                return table[:s, :s]
            case "torch":
                return nn.Transformer.generate_square_subsequent_mask(s)
            case "all":
                return torch.ones(s, s, dtype=torch.bool)
            case "window":
                return (torch.arange(s)[:, None] - torch.arange(s)).abs() < 3
        return None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(x.shape[1])).square().mean()


@pytest.mark.parametrize(
    ("kind", "causal", "masked"),
    [
        *[(kind, True, False) for kind in ("tril", "triu", "compare", "table", "torch")],
        ("all", False, False),
        ("none", False, False),
        ("window", False, True),
    ],
)
def test_masks_of_sizes_become_attributes(kind: str, causal: bool, masked: bool) -> None:
    model = _Attends(kind)
    batch = {"x": torch.randn(2, 7, 8)}
    program = trace(model, batch, dynamic={"x": {0: "b", 1: "s"}})
    (node,) = (n for body in program.bodies.values() for n in body.graph.nodes if n.target is attention)
    assert node.args[5] is causal
    assert (node.args[3] is not None) is masked
    other = {"x": torch.randn(3, 5, 8)}
    torch.testing.assert_close(program.run(other, dict(model.named_parameters())), model(**other))


def test_repeated_key_heads_are_grouped() -> None:
    def function(x: Tensor) -> Tensor:
        q = x.view(-1, 3, 2, 1).repeat(1, 2, 1, 4)
        k = x.view(-1, 3, 2, 1).expand(-1, -1, -1, 4)
        k = k[:, :, None].expand(-1, 3, 2, 2, 4).reshape(-1, 6, 2, 4)
        return F.scaled_dot_product_attention(q, k, k)

    program = trace(Step(function), {"x": torch.randn(3, 6)})
    (node,) = (n for body in program.bodies.values() for n in body.graph.nodes if n.target is attention)
    assert str(node.args[1].meta["hgc"].value.shape) == "(b, 3, 2, 4)"

"""Every attention is one ``hgc.ir.ops.attention`` node: kernels called by user code, repeated key heads, masks that only say "causal"."""

from __future__ import annotations

from typing import Any

import sympy
from torch import fx

from hgc.ir.ops.attention import attention
from hgc.tracing.normalise.edit import argument, aten, base, retarget, tensor


def canonical_attention(graph: fx.Graph) -> None:
    """Rewrite ``scaled_dot_product_attention``, then simplify all attentions. The graph must be clean of no-ops."""
    for node in list(graph.nodes):
        if node.target is aten.scaled_dot_product_attention.default:
            _from_kernel(node)
    for node in list(graph.nodes):
        if node.target is attention:
            _share_heads(node)


def _from_kernel(node: fx.Node) -> None:
    q, k, v = (argument(node, name) for name in ("query", "key", "value"))
    if any(len(tensor(x).shape) != 4 for x in (q, k, v)):  # type: ignore[union-attr]
        return
    width = tensor(q).shape[3]  # type: ignore[union-attr]
    scale = argument(node, "scale")
    if scale is None:
        if not width.is_Integer:
            return
        scale = int(width) ** -0.5
    causal, dropout = bool(argument(node, "is_causal")), float(argument(node, "dropout_p"))
    retarget(node, attention, (q, k, v, argument(node, "attn_mask"), None, causal, 0, float(scale), 0.0, dropout))


def _share_heads(node: fx.Node) -> None:
    """Key and value heads repeated for their query heads need not be: the operator groups heads itself."""
    q, k, v, *rest = node.args
    unrepeated = _unrepeated(k), _unrepeated(v)
    if None not in unrepeated and unrepeated[0][1] == unrepeated[1][1]:  # type: ignore[index]
        node.args = (q, unrepeated[0][0], unrepeated[1][0], *rest)  # type: ignore[index]


def _unrepeated(x: Any) -> tuple[fx.Node, int] | None:
    """The [B, G, T, D] tensor whose heads ``x`` repeats in place, and how often; ``None`` if ``x`` is something else."""
    if base(x) == "aten::repeat_interleave" and isinstance(x.args[1], int) and argument(x, "dim") in (1, -3):
        return x.args[0], x.args[1]
    if base(x) != "aten::reshape" or base(x.args[0]) != "aten::expand":
        return None
    expanded = x.args[0]
    if base(expanded.args[0]) != "aten::unsqueeze" or expanded.args[0].args[1] not in (2, -3):
        return None
    source = expanded.args[0].args[0]
    before, middle, after = tensor(source), tensor(expanded), tensor(x)
    if before is None or middle is None or after is None or len(before.shape) != 4 or len(middle.shape) != 5:
        return None
    batch, heads, length, width = before.shape
    repeats = middle.shape[2]
    repeated = (batch, heads * repeats, length, width)
    same = middle.shape == (batch, heads, repeats, length, width) and after.shape == repeated
    return (source, int(repeats)) if same and isinstance(repeats, sympy.Integer) else None

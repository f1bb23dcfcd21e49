"""Attention: batch and heads stay where they are; the sequence is exchanged for heads (Ulysses) or keys go round (ring)."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from hgc.ir.ops.attention import attention as attention_op
from hgc.ir.placement import Placement, Shard, zigzag
from hgc.ir.rules.core import Call, Case, Operand, Rewrite, append_axis, rule

EXCHANGE, RING = "exchange", "ring"
"""The ways to run attention whose sequence is sharded; a layout says which one an axis takes."""

_BATCH, _HEADS, _SEQUENCE = 0, 1, 2


@rule(attention_op)
def attention(call: Call) -> Iterator[Case]:
    if call.axis == call["exchange_axis"]:
        yield _along_sequence(call, Shard(_SEQUENCE), EXCHANGE, None)
        return
    if call.axis == call["ring_axis"]:
        yield _along_sequence(call, Shard(_SEQUENCE, zigzag(1)) if call["zigzag"] else Shard(_SEQUENCE), RING, None)
        return
    if call.axis not in call["random_axes"]:
        yield call.all_whole()
    yield from _batch_and_heads(call)
    yield from _rows(call)
    yield from _sequence(call)


def _batch_and_heads(call: Call) -> Iterator[Case]:
    """Batch, or query heads with the key-value heads of their groups; a single key-value head stays whole."""
    q, k, v, bias, sinks = (call[name] for name in ("q", "k", "v", "bias", "sinks"))
    exchanged = call.ranks(call["exchange_axis"])
    for dim, whole in ((_BATCH, q.shape[_BATCH]), (_HEADS, q.shape[_HEADS])):
        shared = dim == _HEADS and k.shape[_HEADS] == 1
        if not call.divides(whole) or not (shared or call.divides(k.shape[dim])):
            continue
        if dim == _HEADS and call.number(whole) % (call.size * exchanged):
            continue
        placed: dict[int, Placement] = {o.index: Shard(dim) for o in ((q,) if shared else (q, k, v))}
        own = _own_dim(q, bias, dim)
        if bias is not None and own >= 0 and bias.shape[own] == whole:
            placed[bias.index] = Shard(own)
        if sinks is not None and dim == _HEADS:
            placed[sinks.index] = Shard(0)
        yield call.case(placed, Shard(dim), rewrite=_dropping(call))


def _rows(call: Call) -> Iterator[Case]:
    """Without a mask that counts positions every row is on its own."""
    q, bias = call["q"], call["bias"]
    others = [axis for axis in (call["exchange_axis"], call["ring_axis"]) if axis is not None]
    if call["causal"] or call["window"] or not call.divides(q.shape[_SEQUENCE]) or not all(map(call.is_before, others)):
        return
    placed: dict[int, Placement] = {q.index: Shard(_SEQUENCE)}
    own = _own_dim(q, bias, _SEQUENCE)
    if bias is not None and own >= 0 and bias.shape[own] == q.shape[_SEQUENCE]:
        placed[bias.index] = Shard(own)
    yield call.case(placed, Shard(_SEQUENCE), rewrite=_dropping(call))


def _sequence(call: Call) -> Iterator[Case]:
    """What an axis that shards the sequence can do, where it divides rows and columns."""
    q, k = call["q"], call["k"]
    if not (call.divides(q.shape[_SEQUENCE]) and call.divides(k.shape[_SEQUENCE])) or call["exchange_axis"] is not None:
        return
    if call.number(q.shape[_HEADS]) % call.size == 0:
        yield _along_sequence(call, Shard(_SEQUENCE), EXCHANGE, _named(call, "exchange_axis"))
    if call["ring_axis"] is None:
        yield _along_sequence(call, Shard(_SEQUENCE), RING, _named(call, "ring_axis"))
        if all(call.number(o.shape[_SEQUENCE]) % (2 * call.size) == 0 for o in (q, k)):
            yield _along_sequence(call, Shard(_SEQUENCE, zigzag(1)), RING, _named(call, "ring_axis", in_zigzag=True))


def _along_sequence(call: Call, shard: Shard, method: str, rewrite: Rewrite | None) -> Case:
    """The bias has a rank's own rows in a ring, and is whole for an exchange."""
    q, k, v, bias = (call[name] for name in ("q", "k", "v", "bias"))
    placed: dict[int, Placement] = {o.index: shard for o in (q, k, v)}
    own = _own_dim(q, bias, _SEQUENCE)
    if method == RING and bias is not None and own >= 0 and bias.shape[own] == q.shape[_SEQUENCE]:
        placed[bias.index] = Shard(own, shard.parts)
    return call.case(placed, shard, rewrite=rewrite, method=method)


def _own_dim(q: Operand, bias: Operand | None, dim: int) -> int:
    """The dim of a bias that stands for ``dim`` of the scores; negative if it has none."""
    return -1 if bias is None else dim - (q.rank - bias.rank)


def _dropping(call: Call) -> Rewrite | None:
    """Weights that are dropped differ between ranks that hold different scores."""
    return append_axis("random_axes") if call["dropout"] and call.axis not in call["random_axes"] else None


def _named(call: Call, argument: str, in_zigzag: bool = False) -> Rewrite:
    dropping = _dropping(call)

    def rewrite(node: fx.Node, axis: str, size: int) -> fx.Node:
        node.update_kwarg(argument, axis)
        if in_zigzag:
            node.update_kwarg("zigzag", True)
        return node if dropping is None else dropping(node, axis, size)

    return rewrite

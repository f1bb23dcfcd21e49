"""Ring attention: every rank keeps its queries, keys and values travel from rank to rank (https://arxiv.org/abs/2310.01889).

A rank's positions are one chunk of the sequence, or two in zigzag order. Each pair of a chunk of rows and a chunk of columns is a tile;
tiles that a causal mask or a window leaves empty are skipped. Backward sends keys and values round again, with their gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hgc import _torch_compat as raw
from hgc.ir.ops import attention_tiles as tiles
from hgc.ir.ops import groups, keyed
from hgc.ir.ops.random import seeded


@dataclass(frozen=True)
class Masking:
    """What attention does to scores; ``seed`` is what the dropped weights follow from.

    ``places``: where a rank's batch rows, heads and positions are in the global tensor, and its sizes; with them the dropped weights are
    those of one device.
    """

    causal: bool
    window: int
    scale: float
    softcap: float
    dropout: float
    seed: int
    zigzag: bool
    places: tuple[tuple[Tensor, int], ...] | None = None


@dataclass(frozen=True)
class Chunk:
    """Positions ``start`` to ``start + length`` of the sequence, which a rank holds from ``local`` on."""

    start: int
    local: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The chunk of a tensor that holds a rank's positions."""
        return x.narrow(dim, self.local, self.length)


def chunks(rank: int, ranks: int, local: int, zigzag: bool) -> tuple[Chunk, ...]:
    """The positions of a rank that holds ``local`` of them."""
    if not zigzag:
        return (Chunk(rank * local, 0, local),)
    half = local // 2
    return Chunk(rank * half, 0, half), Chunk((2 * ranks - 1 - rank) * half, half, half)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, masking: Masking, group: groups.Group
) -> Tensor:
    """Attention to the keys of all ranks.

    Args:
        q: [B, H, S / n, D], this rank's positions
        k, v: [B, G, T / n, D or E]; G divides H
        bias: broadcastable to [B, H, S / n, T]: own rows, all columns; boolean (True = attend) or added
        sinks: [H], whole

    Returns [B, H, S / n, E]. Gradients of ``bias`` (where rows are broadcast) and ``sinks`` are the rank's part (kind R).
    """
    out: Tensor = _Ring.apply(q, k, v, bias, sinks, masking, group)  # type: ignore[no-untyped-call]
    return out


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, masking: Masking, group: groups.Group
    ) -> Tensor:
        ring = RingTiles(q, bias, masking, group)
        dtype = tiles.precise(q.dtype)
        out = q.new_zeros(*q.shape[:3], v.size(3), dtype=dtype)
        sums = q.new_full(q.shape[:3], -torch.inf, dtype=dtype)
        for source, keys, values in _travelling(k, v, group):
            for rows, _, tile in ring.at(source, keys, values):
                merged = tiles.merge(rows.of(out, 2), rows.of(sums, 2), *tiles.forward(tile))
                rows.of(out, 2).copy_(merged[0])
                rows.of(sums, 2).copy_(merged[1])
        if sinks is not None:
            none = torch.zeros_like(out)
            out, sums = tiles.merge(out, sums, none, sinks.to(dtype).view(1, -1, 1).expand_as(sums))
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, bias, sinks, out, sums)
        ctx.masking, ctx.group = masking, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, k, v, bias, sinks, out, sums = ctx.saved_tensors
        grad = grads[0].contiguous()  # kernels read rows as they lie
        needs_bias = ctx.needs_input_grad[3]
        ring = RingTiles(q, bias, ctx.masking, ctx.group)
        grad_q = torch.zeros_like(q, dtype=sums.dtype)
        grad_bias = torch.zeros_like(bias, dtype=sums.dtype) if needs_bias else None
        returning = _Returning(ctx.group)
        for source, keys, values in _travelling(k, v, ctx.group):
            grad_k, grad_v = torch.zeros_like(k, dtype=sums.dtype), torch.zeros_like(v, dtype=sums.dtype)
            for rows, columns, tile in ring.at(source, keys, values):
                found = tiles.backward(tile, rows.of(grad, 2), rows.of(out, 2), rows.of(sums, 2), needs_bias)
                rows.of(grad_q, 2).add_(found.q)
                columns.of(grad_k, 2).add_(_by_group(found.k, k.size(1)))
                columns.of(grad_v, 2).add_(_by_group(found.v, k.size(1)))
                if grad_bias is not None and found.bias is not None:
                    _bias_part(grad_bias, rows, columns).add_(found.bias)
            returning.add(grad_k, grad_v)
        grad_k, grad_v = returning.home()
        grad_sinks = None
        if sinks is not None:
            shares = torch.exp(sinks.to(sums.dtype).view(1, -1, 1) - sums)
            grad_sinks = -(shares * (grad.to(sums.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
        given = (q, k, v, bias)
        found_all = (grad_q, grad_k, grad_v, grad_bias)
        return *(None if g is None else g.to(x.dtype) for g, x in zip(found_all, given, strict=True)), grad_sinks, None, None


@dataclass(frozen=True)
class RingTiles:
    """The tiles of a rank's rows with any rank's columns."""

    q: Tensor
    bias: Tensor | None
    masking: Masking
    group: groups.Group

    def at(self, source: int, k: Tensor, v: Tensor) -> Iterator[tuple[Chunk, Chunk, tiles.Tile]]:
        """Tiles with the keys of rank ``source``, without those that are empty."""
        heads = self.q.size(1) // k.size(1)
        if heads > 1:
            k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
        ranks, zigzag = self.group.size, self.masking.zigzag
        for rows in chunks(self.group.rank, ranks, self.q.size(2), zigzag):
            for columns in chunks(source, ranks, k.size(2), zigzag):
                if self._is_visible(rows, columns):
                    yield rows, columns, self._tile(rows, columns, k, v, ranks * k.size(2))

    def _is_visible(self, rows: Chunk, columns: Chunk) -> bool:
        if self.masking.causal and columns.start >= rows.stop:
            return False
        return not self.masking.window or columns.stop > rows.start - self.masking.window + 1

    def _tile(self, rows: Chunk, columns: Chunk, k: Tensor, v: Tensor, all_columns: int) -> tiles.Tile:
        q, k, v = rows.of(self.q, 2), columns.of(k, 2), columns.of(v, 2)
        bias = _bias_part(self.bias, rows, columns) if self.bias is not None else None
        m = self.masking
        diagonal = m.causal and not m.window and (rows.start, rows.stop) == (columns.start, columns.stop)
        allowed = None if diagonal else self._allowed(rows, columns)
        return tiles.Tile(q, k, v, m.scale, m.softcap, bias, diagonal, allowed, self._kept(rows, columns, all_columns))

    def _allowed(self, rows: Chunk, columns: Chunk) -> Tensor | None:
        causal = self.masking.causal and columns.stop > rows.start + 1
        window = self.masking.window and columns.start <= rows.stop - 1 - self.masking.window
        if not causal and not window:
            return None
        row = torch.arange(rows.start, rows.stop, device=self.q.device)[:, None]
        column = torch.arange(columns.start, columns.stop, device=self.q.device)[None, :]
        allowed = column <= row if causal else torch.ones_like(column <= row)
        return allowed & (column > row - self.masking.window) if window else allowed

    def _kept(self, rows: Chunk, columns: Chunk, all_columns: int) -> Tensor | None:
        """Factors of dropout, the same in forward and backward."""
        p = self.masking.dropout
        if not p:
            return None
        dtype = tiles.precise(self.q.dtype)
        if self.masking.places is not None:
            batch, heads, (own, length) = self.masking.places
            keys = torch.arange(columns.start, columns.stop, device=self.q.device), all_columns
            return keyed.factors(self.masking.seed, (batch, heads, (rows.of(own, 0), length), keys), p, dtype)
        with seeded(hash((self.masking.seed, rows.start, columns.start))):
            return F.dropout(self.q.new_ones(*self.q.shape[:2], rows.length, columns.length, dtype=dtype), p)


def _bias_part(bias: Tensor, rows: Chunk, columns: Chunk) -> Tensor:
    """What of a bias with a rank's rows and all columns belongs to a tile."""
    if bias.size(-1) > 1:
        bias = bias.narrow(-1, columns.start, columns.length)
    return rows.of(bias, bias.dim() - 2) if bias.dim() > 1 and bias.size(-2) > 1 else bias


def _by_group(grad: Tensor, groups_of_heads: int) -> Tensor:
    """Sum the gradients of the query heads that read one key-value head."""
    return torch.unflatten(grad, 1, (groups_of_heads, grad.size(1) // groups_of_heads)).sum(2)


def _travelling(k: Tensor, v: Tensor, group: groups.Group) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Keys and values of every rank with its number, own ones first; the next are under way while the caller works."""
    held = torch.cat([k.reshape(-1), v.reshape(-1)])
    for step in range(group.size):
        last = step == group.size - 1
        started = None if last else raw.start_shift(held, group.rank, group.size, group.name)
        keys, values = torch.split(held, [k.numel(), v.numel()])
        yield (group.rank - step) % group.size, keys.view(k.shape), values.view(v.shape)
        held = held if started is None else raw.finished(started)


class _Returning:
    """Gradients of keys and values on their way home: each rank adds its part and sends them on."""

    def __init__(self, group: groups.Group) -> None:
        self.group = group
        self.started: Tensor | None = None
        self.shapes: tuple[torch.Size, torch.Size] | None = None

    def add(self, grad_k: Tensor, grad_v: Tensor) -> None:
        self.shapes = grad_k.shape, grad_v.shape
        total = torch.cat([grad_k.reshape(-1), grad_v.reshape(-1)])
        if self.started is not None:
            total = total + raw.finished(self.started)
        alone = self.group.size == 1
        self.started = total if alone else raw.start_shift(total, self.group.rank, self.group.size, self.group.name)

    def home(self) -> tuple[Tensor, Tensor]:
        assert self.started is not None
        assert self.shapes is not None
        k, v = self.shapes
        arrived = self.started if self.group.size == 1 else raw.finished(self.started)
        grad_k, grad_v = torch.split(arrived, [k.numel(), v.numel()])
        return grad_k.view(k), grad_v.view(v)

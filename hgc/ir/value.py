"""What hgc knows about an fx node: ``node.meta["hgc"]`` holds one :class:`Info`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeAlias

import sympy
import torch
from torch import fx

from hgc.ir.placement import Placement, Shard

Size: TypeAlias = sympy.Expr
"""A tensor size: a sympy integer or an expression in the program's symbols."""


@dataclass(frozen=True)
class Value:
    """One tensor of the program.

    ``shape`` is the *global* shape, as on a single device, in the program's symbols; it never changes. ``placements`` holds
    one ``(axis, placement)`` pair for each mesh axis lowered so far, major axis first, so that
    ``local_shape`` is the shape one rank holds after those axes.
    """

    shape: tuple[Size, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    placements: tuple[tuple[str, Placement], ...] = ()

    def on(self, axis: str) -> Placement:
        """The placement on a mesh axis; ``KeyError`` if that axis is not lowered yet."""
        return dict(self.placements)[axis]

    def placed(self, axis: str, placement: Placement) -> Value:
        """The same value with the next axis lowered."""
        return replace(self, placements=(*self.placements, (axis, placement)))

    def local_shape(self, mesh: dict[str, int]) -> tuple[Size, ...]:
        """Shape on one rank, given the size of each mesh axis."""
        shape = list(self.shape)
        for axis, placement in self.placements:
            if isinstance(placement, Shard):
                shape[placement.dim] = shape[placement.dim] / mesh[axis]
        return tuple(shape)

    @property
    def numel(self) -> Size:
        return sympy.prod(self.shape, start=sympy.Integer(1)) if self.shape else sympy.Integer(1)

    @property
    def nbytes(self) -> Size:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Info:
    """Everything hgc attaches to a node.

    ``value`` is a :class:`Value`, a tuple of them for operators with several tensor outputs, or ``None`` for a node that
    computes a size, in which case ``size`` holds the expression. ``role`` tells body placeholders apart: ``"input"``,
    ``"parameter"`` or ``"buffer"``. ``path`` is the module path in the user's model
    (``"model.layers.0.self_attn"``; in a shared body: relative to the block, ``"self_attn"``). ``recompute``: of what the node computes
    (a block's call, or an operator in a body) only the operands are kept, and it runs again in backward.
    """

    value: Value | tuple[Value, ...] | None = None
    size: Size | None = None
    role: str = ""
    path: str = ""
    source: str = ""
    recompute: bool = False


def info(node: fx.Node) -> Info:
    """The node's :class:`Info`; ``KeyError`` if a pass inserted a node without one."""
    found = node.meta["hgc"]
    assert isinstance(found, Info)
    return found


def value(node: fx.Node) -> Value:
    """The single tensor that a node computes."""
    found = info(node).value
    assert isinstance(found, Value), f"{node.name} is not one tensor: {found}"
    return found


def is_tensor(node: fx.Node) -> bool:
    return isinstance(info(node).value, Value)


def is_size(node: fx.Node) -> bool:
    """Does the node compute a size (and not a tensor, nor the output)?"""
    return node.op != "output" and info(node).size is not None


def set_info(node: fx.Node, new: Info) -> None:
    node.meta["hgc"] = new

"""What a device reaches: products of matrices over shapes, memory-bound kernels over sizes, and the least time of a kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hgc.tools.calibration.points import Array, Products
from hgc.tools.profile.clock import seconds
from hgc.tools.profile.cold import in_turn, sets

CPU_SHAPES = tuple((m, n, k) for m in (64, 256, 1024) for n, k in ((64, 64), (128, 512), (512, 128), (512, 512), (1024, 256)))
GPU_SHAPES = tuple((m, n, k) for m in (512, 2048, 8192) for n, k in ((512, 512), (1024, 4096), (4096, 1024), (4096, 4096), (8192, 2048)))
CPU_ELEMENTS, GPU_ELEMENTS = (2**14, 2**17, 2**20, 2**22), (2**20, 2**23, 2**26)
ROW = 256
"""Elements that a norm or softmax takes together."""
CHAIN = 20
KERNELS = 12
"""Of one link of the chain: norm, copy, product, SiLU, product, sum; backward one or two for each operand that needs a gradient."""


@dataclass(frozen=True)
class Moved:
    """Memory-bound kernels: bytes read and written, and seconds."""

    bytes: Array
    measured_s: Array


def products(device: torch.device, dtype: torch.dtype, shapes: Sequence[tuple[int, int, int]]) -> Products:
    """Times of (m, k) x (k, n), each rank on its own data."""
    taken = [_product_s(device, dtype, *shape) for shape in shapes]
    m, n, k = (np.array(column, dtype=np.float64) for column in zip(*shapes, strict=True))
    return Products(m, n, k, np.ones_like(m), np.array(taken), ("measured",) * len(shapes))


def _product_s(device: torch.device, dtype: torch.dtype, m: int, n: int, k: int) -> float:
    bytes_ = (m * k + n * k + m * n) * dtype.itemsize
    pairs = [(torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)) for _ in sets(device, bytes_)]
    return seconds(in_turn([partial(_linear, *pair) for pair in pairs]), device, together=False)


def _linear(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight.t()


def moved(device: torch.device, dtype: torch.dtype, elements: Sequence[int]) -> Moved:
    """Times of the kernels that transformers spend their memory traffic on; bytes as hgc counts them, each operand and result once."""
    found = []
    for count in elements:
        bytes_ = count * dtype.itemsize
        turns = [_kernels(torch.randn(count // ROW, ROW, device=device, dtype=dtype)) for _ in sets(device, 3 * bytes_)]
        for same in zip(*turns, strict=True):
            taken_s = seconds(in_turn([kernel for kernel, _ in same]), device, together=False)
            found.append((same[0][1] * bytes_, taken_s))
    sizes, taken = zip(*found, strict=True)
    return Moved(np.array(sizes, dtype=np.float64), np.array(taken))


def _kernels(x: Tensor) -> list[tuple[Callable[[], Tensor], int]]:
    """Kernels with how many tensors as large as ``x`` they read and write."""
    other, weight = torch.randn_like(x), torch.randn(ROW, device=x.device, dtype=x.dtype)
    return [
        (lambda: x + other, 3),
        (lambda: x * weight, 2),
        (lambda: F.gelu(x), 2),
        (lambda: F.silu(x), 2),
        (lambda: F.layer_norm(x, (ROW,), weight), 2),
        (lambda: torch.softmax(x, -1), 2),
        (lambda: x.t().contiguous(), 2),
    ]


def launch_s(device: torch.device) -> float:
    """Seconds of one small kernel, its share of Python and autograd included, forward and backward of a chain of what layers are made of.

    On a GPU the chain is replayed as a graph, because launches queue up there.
    """
    x, weight = (torch.ones(8, 8, device=device, requires_grad=True) for _ in range(2))
    scale = torch.ones(8, device=device, requires_grad=True)

    def chain() -> None:
        y = x
        for _ in range(CHAIN):
            normed = F.layer_norm(y, (8,), scale)
            turned = normed.view(2, 4, 8).transpose(0, 1).reshape(8, 8)
            y = y + F.silu(F.linear(turned, weight)) * normed
        torch.autograd.grad(y.sum(), (x, weight, scale))

    if device.type == "cuda":
        chain()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        return seconds(graph.replay, device, together=False) / (KERNELS * CHAIN)
    return seconds(chain, device, together=False) / (KERNELS * CHAIN)

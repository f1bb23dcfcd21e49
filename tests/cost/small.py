"""Programs for the tests of costs: every family traced once, with batches of other sizes, and what real runs keep and send."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hgc._torch_compat import storage_key
from hgc.compiler import distribute
from hgc.cost.stand_ins import STAND_INS
from hgc.cost.symbolic import ProgramCosts
from hgc.ir import ops
from hgc.ir.program import Program
from hgc.passes.analysis.costs import BlockCosts
from hgc.plan import Plan
from hgc.strategy import Strategy
from hgc.tools.bench import zoo
from hgc.tracing import trace
from tests import families

Batch = dict[str, Tensor]


def _language(b: int, s: int) -> Batch:
    return {"input_ids": families.token_ids(b, s, 1), "labels": families.token_ids(b, s, 2)}


def _translation(b: int, s: int) -> Batch:
    return {"input_ids": families.token_ids(b, s, 1), "labels": families.token_ids(b, s // 2 + 1, 2)}


def _pictures(name: str, size: int, classes: str = "labels") -> Callable[[int, int], Batch]:
    return lambda b, s: {name: torch.randn(b, 3, size, size), classes: torch.arange(b) % 4}


def mixtral() -> families.Built:
    """With one product for each expert, which torch counts; it does not count those of its grouped kernel on a CPU."""
    entry = zoo.find("Mixtral")
    model: Any = entry.build("small")
    model.set_experts_implementation("eager")
    return model, entry.batch(4, 16)


def _few_tokens(b: int, s: int) -> Batch:
    return zoo.find("Mixtral").batch(b, s)


FAMILIES: dict[str, tuple[Callable[[], families.Built], Callable[[int, int], Batch]]] = {
    "llama": (families.llama, _language),
    "gpt2": (families.gpt2_odd_vocabulary, _language),
    "bert": (families.bert, _language),
    "t5": (families.t5, _translation),
    "vit": (families.vit, _pictures("pixel_values", 32)),
    "cnn": (families.cnn, _pictures("images", 8)),
    "mixtral": (mixtral, _few_tokens),
}
SIZES = ((2, 8), (3, 21), (5, 12))


@cache
def traced(family: str) -> tuple[nn.Module, Program]:
    """The model with real weights, and its program."""
    torch.manual_seed(0)
    model, batch = FAMILIES[family][0]()
    return model, trace(model, batch)


@cache
def costs(family: str) -> ProgramCosts:
    return BlockCosts().run(traced(family)[1])


@cache
def lowered(family: str, strategy: str) -> tuple[Program, Plan]:
    plan = Plan(Strategy.parse(strategy))
    return distribute(traced(family)[1], plan), plan


@cache
def lowered_costs(family: str, strategy: str) -> ProgramCosts:
    return BlockCosts().run(lowered(family, strategy)[0])


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}


def as_on_gpu(program: Program) -> Program:
    """The program with stand-ins for what the CPU does in another way; attention stays real where the CPU has the fused kernel."""
    changed = program.copy()
    for body in changed.bodies.values():
        for node in body.graph.nodes:
            if node.target is not ops.attention or not _has_kernel(node.args):
                node.target = STAND_INS.get(node.target, node.target)
        body.recompile()
    return changed


def _has_kernel(args: Any) -> bool:
    shape_q, shape_k, shape_v = (x.meta["hgc"].value.shape for x in args[:3])
    return args[3] is None and shape_q[1] == shape_k[1] and shape_q[3] == shape_v[3]


@contextmanager
def gpu_functions() -> Iterator[None]:
    """Dropout with masks of one byte, attention without dropout, which the CPU's fused kernel does not know."""
    attend = F.scaled_dot_product_attention

    def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(x, p, training)[0] if training and p else x

    def attend_all(q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **more: Any) -> Tensor:
        return attend(q, k, v, attn_mask, 0.0, *args, **more)

    with mock.patch.object(F, "dropout", drop), mock.patch.object(F, "scaled_dot_product_attention", attend_all):
        yield


def kept_bytes(run: Callable[[], Tensor], known: Mapping[str, Tensor]) -> int:
    """Bytes of memory that autograd keeps, without that of ``known`` tensors; each memory once."""
    mine = {storage_key(t) for t in known.values()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept.setdefault(storage_key(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = run()
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for key, tensor in kept.items() if key not in mine)

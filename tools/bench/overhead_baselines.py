"""The programs that an expert writes by hand for the same models and plans: eager, DDP, FSDP2, DTensor tensor parallelism.

Each ``loss_and_backward(batch)`` takes the rows of this process and returns its loss; the optimizer is the caller's. Every one is in
the form that is fastest on gloo: DDP's gradients live in its buckets, FSDP2 sharding goes layer by layer, tensor parallelism calls
the layers itself so that the residual stream is a plain local tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from hgc.strategy import Strategy
from hgc.tools.bench.overhead_models import Batch

LossAndBackward = Callable[[Batch], Tensor]


def describe(strategy: Strategy) -> str:
    """What the emitted program is compared with, in a few words."""
    if strategy.devices == 1:
        return "eager model"
    sharded = ["fully_shard per layer"] if strategy.zero == 3 else []
    if strategy.tp > 1:
        return " + ".join(["DTensor tensor parallelism", *sharded])
    return sharded[0].replace("fully_shard", "FSDP2, fully_shard") if sharded else "DistributedDataParallel"


def by_hand(model: nn.Module, strategy: Strategy) -> tuple[LossAndBackward, nn.Module]:
    """The hand-written program for a strategy, and the module whose parameters it trains."""
    if strategy.devices == 1:
        return _plain(model), model
    if strategy.tp == 1:
        mesh = init_device_mesh("cpu", (strategy.dp,), mesh_dim_names=("dp",))
        wrapped = _fully_sharded(model, mesh) if strategy.zero == 3 else _replicated(model)
        return _plain(wrapped), model
    if strategy.dp > 1 and strategy.zero != 3:
        raise ValueError("DTensor parameters meet DDP in no public interface of torch; compare tp with dp under zero3")
    mesh = init_device_mesh("cpu", (strategy.dp, strategy.tp), mesh_dim_names=("dp", "tp"))
    forward = _tensor_parallel(model, mesh["tp"])
    if strategy.dp > 1:
        _fully_sharded(model, mesh["dp"])
    return _with_parallel_loss(model, forward), model


def make_optimizer(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW in its multi-tensor form; tensors on different meshes go into groups of their own, as that form demands."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return torch.optim.AdamW([{"params": group} for group in groups.values()], lr=1e-3, fused=True)


def _plain(model: nn.Module) -> LossAndBackward:
    def loss_and_backward(batch: Batch) -> Tensor:
        loss: Tensor = model(**batch).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return loss_and_backward


def _replicated(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)


def _fully_sharded(model: Any, mesh: DeviceMesh) -> nn.Module:
    for layer in _layers(model):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    return model  # type: ignore[no-any-return]


def _layers(model: Any) -> list[nn.Module]:
    return list(model.transformer.h if hasattr(model, "transformer") else model.model.layers)


# -- tensor parallelism ---------------------------------------------------------------------------------------------------------------


def _tensor_parallel(model: Any, mesh: DeviceMesh) -> Callable[[Any, Tensor], Tensor]:
    """Shard the model in place; returns ``forward(model, ids) -> logits``, a DTensor split along the vocabulary."""
    if hasattr(model, "transformer"):
        _shard_gpt2(model, mesh)
        return _gpt2_logits
    _shard_llama(model, mesh)
    return _llama_logits


def _with_parallel_loss(model: Any, logits_of: Callable[[Any, Tensor], Tensor]) -> LossAndBackward:
    model.forward = lambda ids: logits_of(model, ids)  # called through the module, so that the hooks of FSDP2 run

    def loss_and_backward(batch: Batch) -> Tensor:
        targets = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:].reshape(-1)
        with loss_parallel():
            loss = F.cross_entropy(model(batch["input_ids"]).flatten(0, 1), targets)
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return loss_and_backward


def _shared_styles() -> dict[str, ParallelStyle]:
    """Table and head are split along the vocabulary, the residual stream along the sequence."""
    return {
        "table": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
        "norm": SequenceParallel(use_local_output=True),
        "column": ColwiseParallel(),
        "row": RowwiseParallel(output_layouts=Shard(1)),
        "gather": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True),
    }


def _shard_llama(model: Any, mesh: DeviceMesh) -> None:
    style = _shared_styles()
    gather_named = PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": Shard(1)}, desired_input_kwarg_layouts={"hidden_states": Replicate()}, use_local_output=True
    )
    parallelize_module(model, mesh, {"model.embed_tokens": style["table"], "model.norm": style["norm"], "lm_head": style["head"]})
    for layer in model.model.layers:
        parallelize_module(
            layer,
            mesh,
            {
                "input_layernorm": style["norm"],
                "self_attn": gather_named,
                "self_attn.q_proj": style["column"],
                "self_attn.k_proj": style["column"],
                "self_attn.v_proj": style["column"],
                "self_attn.o_proj": style["row"],
                "post_attention_layernorm": style["norm"],
                "mlp": style["gather"],
                "mlp.gate_proj": style["column"],
                "mlp.up_proj": style["column"],
                "mlp.down_proj": style["row"],
            },
        )


def _llama_logits(model: Any, ids: Tensor) -> Tensor:
    x = model.model.embed_tokens(ids)
    rotary = model.model.rotary_emb(x, torch.arange(ids.size(1)).unsqueeze(0))
    for layer in model.model.layers:
        x = layer(x, position_embeddings=rotary)
    logits: Tensor = model.lm_head(model.model.norm(x))
    return logits


def _shard_gpt2(model: Any, mesh: DeviceMesh) -> None:
    """GPT-2's ``Conv1D`` becomes ``nn.Linear``, which the parallel styles know; the fused q, k, v are dealt out head by head."""
    style = _shared_styles()
    for layer in model.transformer.h:
        layer.attn.c_attn = _as_linear(layer.attn.c_attn, deal=(3, mesh.size()))
        layer.attn.split_size //= mesh.size()
        layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj = map(_as_linear, (layer.attn.c_proj, layer.mlp.c_fc, layer.mlp.c_proj))
    roots = {"transformer.wte": style["table"], "transformer.ln_f": style["norm"], "lm_head": style["head"]}
    positions = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(0))
    parallelize_module(model, mesh, roots | {"transformer.wpe": positions})
    model.lm_head.weight = model.transformer.wte.weight
    for layer in model.transformer.h:
        parallelize_module(
            layer,
            mesh,
            {
                "ln_1": style["norm"],
                "attn": style["gather"],
                "attn.c_attn": style["column"],
                "attn.c_proj": style["row"],
                "ln_2": style["norm"],
                "mlp": style["gather"],
                "mlp.c_fc": style["column"],
                "mlp.c_proj": style["row"],
            },
        )


def _as_linear(layer: Any, deal: tuple[int, int] | None = None) -> nn.Linear:
    """The same map as ``nn.Linear``; ``deal=(parts, ranks)`` reorders its outputs so that a rank's slice holds its share of each part."""
    weight, bias = layer.weight.detach().t(), layer.bias.detach()
    if deal is not None:
        parts, ranks = deal
        weight = weight.unflatten(0, (parts, ranks, -1)).transpose(0, 1).flatten(0, 2)
        bias = bias.unflatten(0, (parts, ranks, -1)).transpose(0, 1).flatten()
    linear = nn.Linear(weight.size(1), weight.size(0), device="meta")
    linear.weight, linear.bias = nn.Parameter(weight.contiguous()), nn.Parameter(bias.contiguous())
    return linear


def _gpt2_logits(model: Any, ids: Tensor) -> Tensor:
    x = model.transformer.wte(ids) + model.transformer.wpe(torch.arange(ids.size(1)))
    for layer in model.transformer.h:
        x = layer(x)
    logits: Tensor = model.lm_head(model.transformer.ln_f(x))
    return logits


def local_rows(batch: Batch, strategy: Strategy, rank: int) -> Batch:
    """The rows of a global batch that belong to a rank: the data axis is the outer one."""
    share = batch["input_ids"].size(0) // strategy.dp
    first = rank // strategy.tp * share
    return {name: tensor.narrow(0, first, share) for name, tensor in batch.items()}

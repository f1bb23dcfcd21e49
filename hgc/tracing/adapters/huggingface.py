"""Hugging Face transformers: attention and experts as single operators, no caches, no checkpointing."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hgc.tracing import leaves  # noqa: F401  (registers the operators)
from hgc.tracing.shortcuts import Shortcuts, StartOver


def applies(model: nn.Module) -> bool:
    """True if the model has a part from transformers; never imports transformers itself."""
    library = sys.modules.get("transformers")
    return library is not None and any(isinstance(m, library.PreTrainedModel) for m in model.modules())


@dataclass
class _Watch:
    """What masks were asked for, and what attention came by: sliding windows that masks would have held and those that attention
    functions were told of; configs of models that asked for masks and of modules that called the attention function."""

    trusted: bool
    left_out: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)
    asking: dict[int, str] = field(default_factory=dict)
    calling: set[int | None] = field(default_factory=set)

    def bypassed(self) -> set[str]:
        """Names of configs whose models asked for masks and then computed attention by themselves."""
        return set() if None in self.calling else {name for key, name in self.asking.items() if key not in self.calling}


_watch: ContextVar[_Watch] = ContextVar("hgc_watch")


@contextmanager
def prepared(model: nn.Module, inputs: set[str], constants: Mapping[str, Any], shortcuts: Shortcuts) -> Iterator[None]:
    """Configure the copy; while tracing, position ids are known to be one sequence a row unless the user's may say otherwise."""
    from transformers import masking_utils

    _register()
    caches = bool(constants.get("use_cache", any(getattr(config, "use_cache", False) for config in _configs(model))))
    for config in _configs(model):
        _configure(config, shortcuts)
    for module in model.modules():
        if "gradient_checkpointing" in vars(module):
            vars(module)["gradient_checkpointing"] = False
    find_packed = masking_utils.find_packed_sequence_indices
    if "position_ids" not in inputs or caches:  # with a cache, transformers does not look for packed sequences
        masking_utils.find_packed_sequence_indices = lambda position_ids: None
    watch = _Watch(shortcuts.windows)
    token = _watch.set(watch)
    try:
        yield
    except StartOver:
        raise
    except Exception:
        _check_bypassed(watch, shortcuts)  # a model that expected a mask may have stumbled over None
        raise
    finally:
        masking_utils.find_packed_sequence_indices = find_packed
        _watch.reset(token)
    _check_bypassed(watch, shortcuts)
    if not watch.left_out <= watch.told:
        raise StartOver(shortcuts.with_masks(), "Sliding windows are masks: the model's attention is not told its window.")


def _check_bypassed(watch: _Watch, shortcuts: Shortcuts) -> None:
    bypassed = watch.bypassed() - shortcuts.own_attention
    if bypassed:
        reason = f"Models of {', '.join(sorted(bypassed))} compute attention themselves and keep their own implementation."
        raise StartOver(shortcuts.keeping_attention(bypassed), reason)


def _configs(model: nn.Module) -> list[Any]:
    found = [getattr(module, "config", None) for module in model.modules()]
    return list({id(config): config for config in found if config is not None}.values())


def _configure(config: Any, shortcuts: Shortcuts) -> None:
    if getattr(config, "use_cache", False):
        config.use_cache = False
    if hasattr(config, "_attn_implementation") and type(config).__name__ not in shortcuts.own_attention:
        config._attn_implementation = "hgc"
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "hgc"


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ExpertsInterface

    AttentionInterface.register("hgc", attention_forward)
    AttentionMaskInterface.register("hgc", attention_mask)
    ExpertsInterface.register("hgc", experts_forward)


def experts_forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """An experts function of ``ExpertsInterface``: tokens [T, H], chosen experts and their weights [T, K]."""
    rows, offsets, order = torch.ops.hgc.moe_dispatch(hidden_states, top_k_index, module.num_experts)
    expert_of_row = top_k_index.reshape(-1)[order] if module.has_bias else None
    name = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _expert_linear(module, name, rows, offsets, expert_of_row)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    outer = _expert_linear(module, "down_proj", inner, offsets, expert_of_row)
    if module.has_post_expert_norm:
        outer = module.post_expert_norm(outer)
    result: Tensor = torch.ops.hgc.moe_combine(outer, order, top_k_weights)
    return result


def _expert_linear(module: Any, name: str, rows: Tensor, offsets: Tensor, expert_of_row: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.hgc.grouped_linear(rows, getattr(module, name), offsets, bool(module.is_transposed))
    if expert_of_row is None:
        return product
    bias: Tensor = getattr(module, f"{name}_bias")
    return product + bias[expert_of_row]


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """An attention function of ``AttentionInterface``: one operator, with what the mask function left to attributes."""
    watch = _watch.get()
    watch.calling.add(id(module.config) if hasattr(module, "config") else None)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if attention_mask is not None:  # it holds causality and the window already
        causal, sliding_window = False, None
    elif sliding_window:
        watch.told.add(int(sliding_window))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output = torch.ops.hgc.attention(
        query,
        key,
        value,
        _combined(attention_mask, position_bias),
        s_aux,
        bool(causal) and query.shape[2] != 1,
        int(sliding_window or 0),
        float(scale),
        float(softcap or 0.0),
        float(dropout or 0.0),
    )
    return output.transpose(1, 2), None


def _combined(mask: Tensor | None, bias: Tensor | None) -> Tensor | None:
    if mask is None or bias is None:
        return bias if mask is None else mask
    return torch.where(mask, bias, torch.finfo(bias.dtype).min) if mask.dtype == torch.bool else mask + bias


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = False,
    allow_is_bidirectional_skip: bool = False,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """A mask function of ``AttentionMaskInterface``: no tensor where attributes of the attention say the same."""
    from transformers.masking_utils import sdpa_mask

    watch = _watch.get()
    if "config" in kwargs:
        watch.asking[id(kwargs["config"])] = type(kwargs["config"]).__name__
    causal = allow_is_causal_skip and (local_size is None or watch.trusted)
    bidirectional = allow_is_bidirectional_skip and local_size is None
    if attention_mask is None and (causal or bidirectional):
        if local_size is not None:
            watch.left_out.add(local_size)
        return None
    mask = sdpa_mask(batch_size, q_length, kv_length, attention_mask=attention_mask, allow_is_causal_skip=False, **kwargs)
    assert mask is None or isinstance(mask, Tensor)
    return mask

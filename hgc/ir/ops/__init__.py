"""The operators of the IR: targets of graph nodes and what a running program calls, one and the same."""

from hgc.ir.ops.attention import attention
from hgc.ir.ops.collectives import (
    all_gather,
    all_gather_i,
    all_reduce,
    all_reduce_r,
    all_to_all,
    as_invariant,
    as_partial,
    copy_in,
    reduce_scatter,
    shard,
    shard_r,
)
from hgc.ir.ops.groups import axis_rank, axis_size, set_groups, use
from hgc.ir.ops.losses import cross_entropy, vocab_embedding
from hgc.ir.ops.moe import grouped_linear, moe_combine, moe_dispatch
from hgc.ir.ops.norms import batch_norm
from hgc.ir.ops.random import dropout, manual_seed, random_axes
from hgc.ir.ops.reductions import mean

__all__ = [
    "all_gather",
    "all_gather_i",
    "all_reduce",
    "all_reduce_r",
    "all_to_all",
    "as_invariant",
    "as_partial",
    "attention",
    "axis_rank",
    "axis_size",
    "batch_norm",
    "copy_in",
    "cross_entropy",
    "dropout",
    "grouped_linear",
    "manual_seed",
    "mean",
    "moe_combine",
    "moe_dispatch",
    "random_axes",
    "reduce_scatter",
    "set_groups",
    "shard",
    "shard_r",
    "use",
    "vocab_embedding",
]

"""How frameworks ran: what each of a time fused, overlapped and kept, and what is known of single runs.

Nothing in these tables is fitted to a step time; where each is said stands beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hgc.cost.execution import Execution
from hgc.tools.bench.fidelity_models import NotRebuilt
from hgc.tools.bench.fidelity_rows import Row


@dataclass(frozen=True)
class Generation:
    """How frameworks of a time ran. The last entry that fits a row counts.

    Args:
        frameworks: starts of names of frameworks or models. ``gpus``: starts of GPU names; none: all.
        flash: attention in one kernel. ``dropout``: of attention and hidden states; 0: none is run.
        sequence_parallel: norms and dropout are split along the sequence where ``tp`` is above 1.
        gradients: dtype in which they are summed, where parameters are in 16 bits.
        interleaves: pipelines have as many virtual stages as fit, where a row does not say.
        execution: what overlaps, and what is fused.
        reason: where this is said.
        recompute: where a row does not say; "": the least that fits into memory.
    """

    name: str
    frameworks: tuple[str, ...]
    gpus: tuple[str, ...]
    flash: bool
    dropout: float
    sequence_parallel: bool
    gradients: str
    interleaves: bool
    execution: Execution
    reason: str
    recompute: str = ""


CLASSICAL, EXPANDABLE = 0.15, 0.03
"""What torch's caching allocator loses (``Execution.fragmentation``): its classical form, and expandable segments (NeMo, torchtitan)."""
DEEPSPEED_BUCKETS = 2 * 500_000_000 * 2
"""Bytes of DeepSpeed's default ``reduce_bucket_size`` and ``allgather_bucket_size`` (5e8 elements each) in 16 bits."""
OLD_GPUS = ("V100", "A100", "A800")
MEGATRON = Execution(
    fused=True,
    autocast=False,
    copy_free_collectives=True,
    regathers=True,
    recompute_written_attention=True,
    recompute_stops_early=False,
    master_gradients=True,
    overlap_gradients=False,
    overlap_products=True,
    overlap_slowdown=1.126,
    sends_block=True,
    scatter_gather=True,
    fragmentation=CLASSICAL,
)
MEGATRON_CORE = replace(
    MEGATRON,
    fragmentation=EXPANDABLE,
    fused_accumulation=True,
    overlap_gradients=True,
    state_ahead=True,
    overlap_tensor=True,
    sends_block=False,
)
EAGER = Execution(autocast=False, copy_free_collectives=True, fragmentation=CLASSICAL)
COMPILED = Execution(fused=True, autocast=False, copy_free_collectives=True, fragmentation=EXPANDABLE)

GENERATIONS = (
    Generation(
        *("Megatron-LM 2020-2022", ("Megatron-LM",), OLD_GPUS, False, 0.1, False, "float16", False, MEGATRON),
        "arXiv:2104.04473: fused softmax, bias-GELU and bias-dropout-add, scatter/gather between stages; gradients are summed behind the "
        "last backward; arXiv:2205.05198 adds the overlap with weights' gradients",
    ),
    Generation(
        *("DeepSpeed 2020-2022", ("Megatron-DeepSpeed", "DeepSpeed"), OLD_GPUS, False, 0.1, False, "float16", False),
        replace(MEGATRON, overlap_products=False, keeps_gradients=True, keeps_outputs=True, traffic_bytes=DEEPSPEED_BUCKETS),
        "a fork of Megatron-LM of the time; DeepSpeed's pipeline engine sends parts and waits, its ZeRO 1 sums behind the last backward",
    ),
    Generation(
        *(
            "Megatron-Core",
            ("Megatron-LM", "Megatron-Core", "Megatron-Bridge", "NeMo"),
            ("H", "B", "GB"),
            True,
            0.0,
            True,
            "bfloat16",
            True,
        ),
        MEGATRON_CORE,
        "NeMo performance guide: distributed optimizer, traffic of data, tensor and pipeline parallelism overlapped, fused kernels; its "
        "performance recipes reduce gradients in bfloat16 (grad_reduce_in_fp32=False)",
    ),
    Generation(
        *("FSDP", ("llm-foundry", "xformers", "ColossalAI", "InternEvo", "Meta"), (), True, 0.0, True, "float32", False, EAGER),
        "FSDP prefetches one unit ahead; eager kernels beside flash attention",
    ),
    Generation(
        *("nanotron", ("nanotron",), (), True, 0.0, True, "float32", False, replace(EAGER, overlap_gradients=False, sends_block=True)),
        "ultra-scale playbook: flash attention; gradients accumulated in float32",
    ),
    Generation(
        *("compiled", ("torchtitan", "fms-fsdp", "NeMo AutoModel"), (), True, 0.0, True, "float32", False, COMPILED),
        "torch.compile fuses pointwise chains; FSDP2 prefetches",
    ),
    Generation(
        *("JAX", ("MaxText", "Maxtext", "Paxml"), (), True, 0.0, True, "float32", False, COMPILED),
        "XLA fuses pointwise chains and gathers ahead; layers are recomputed unless a recipe says otherwise (MaxText: remat_policy full)",
        recompute="full",
    ),
)


DISPATCH_S = 15.8e-6
"""What PyTorch's host side takes from one kernel to the next if each is waited for: the overhead of a product on an idle A100, which the
fit of the 841 products of ``matmul_efficiency.csv`` finds beside the kernels (their benchmark waits for each)."""


@dataclass(frozen=True)
class Condition:
    """What is known of runs beyond their framework.

    Args:
        datasets: start of their names. ``precision``: start of the row's; "": all. ``least_gpus``: of smaller jobs it is not known.
        execution: what changes in the generation's :class:`Execution`.
        reason: the fact, and where it is said.
    """

    datasets: str
    reason: str
    precision: str = ""
    least_gpus: int = 0
    execution: Mapping[str, Any] = field(default_factory=dict)

    def applies(self, row: Row) -> bool:
        return (
            row.dataset.startswith(self.datasets)
            and row.precision.lower().startswith(self.precision)
            and (row.gpus or 0) >= self.least_gpus
        )


CONDITIONS = (
    Condition(
        "bloom",
        "CUDA_LAUNCH_BLOCKING=1: each kernel is waited for, because jobs of 320 and more GPUs hung without it (BLOOM chronicles)",
        least_gpus=320,
        execution={"dispatch_s": DISPATCH_S},
    ),
    Condition(
        "bloom",
        "DeepSpeed's bfloat16 optimizer sums whole gradients in float32 with an all-reduce (its pipeline engine, _bf16_reduce_grads)",
        precision="bf16",
        execution={"sums_whole": True},
    ),
)


def conditions_of(row: Row) -> tuple[Condition, ...]:
    return tuple(condition for condition in CONDITIONS if condition.applies(row))


def generation_of(row: Row) -> Generation:
    """How the row's framework ran; raises :class:`NotRebuilt` for one that the table does not have."""
    fitting = [each for each in GENERATIONS if _is_of(row, each)]
    if not fitting:
        raise NotRebuilt(f"how {row.framework!r} runs on {row.gpu!r} is not described")
    found, features = fitting[-1], row.features.split()
    if "sequence_parallel=1" in features:
        found = replace(found, sequence_parallel=True)
    if "without flash attention" in row.notes:
        found = replace(found, flash=False)
    if "async_tp" in features:
        found = replace(found, execution=replace(found.execution, overlap_tensor=True))
    if row.framework == "torchtitan" and "torch.compile" not in features:
        found = replace(found, execution=replace(EAGER, fragmentation=EXPANDABLE))
    for condition in conditions_of(row):
        found = replace(found, execution=replace(found.execution, **condition.execution))
    return found


COUNTERS = (
    ("nanotron", "tensors", "torch.cuda.max_memory_allocated, which nanotron logs: tensors only"),
    ("torchtitan", "allocator", "torchtitan logs what torch's allocator has reserved: no driver, no NCCL"),
)
"""Start of dataset -> what the printed memory counts, and where that is said. Others: what the driver shows, everything."""


def printed_bytes(row: Row, tensors: float, allocator: float, driver: float) -> float:
    """Of the memory that tensors, the allocator beside them, and the driver take: what the row's source has printed."""
    counted = next((counter for start, counter, _ in COUNTERS if row.dataset.startswith(start)), "driver")
    return tensors + (allocator if counted != "tensors" else 0.0) + (driver if counted == "driver" else 0.0)


def _is_of(row: Row, found: Generation) -> bool:
    named = row.framework.startswith(found.frameworks) or row.model.startswith(found.frameworks)
    return named and (not found.gpus or row.gpu.startswith(found.gpus))

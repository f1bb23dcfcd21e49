"""Assumptions about how kernels run that neither program nor plan decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Execution:
    """How the same program runs under other runtimes; the default is eager PyTorch with hgc's runtime.

    Args:
        fused: chains of elementwise operators, reductions of rows, norms, dropout and rotary embeddings without a product between them run
            as one kernel each way, as ``torch.compile`` or Megatron-LM's fused kernels do: only what enters and leaves a chain moves, and
            only the least that rebuilds it is saved for backward.
        autocast: computing in 16 bits means torch's autocast, which keeps norms, softmax and losses in float32; ``False``: the whole model
            is in that dtype, as in Megatron-LM, or under FSDP's mixed precision.
        launch_free: launches cost nothing, because CUDA graphs replay them or work hides them.
        dispatch_s: what the host needs before each kernel and no work hides, because each kernel is waited for (CUDA_LAUNCH_BLOCKING).
        copy_free_collectives: tensors lie in memory so that collectives need no copies before or after, as in Megatron-LM's sequence-first
            layout; hgc's own gather and scatter along the sequence copy.
        regathers: what is gathered in front of a product is not kept for backward but gathered again, as in Megatron-LM's sequence
            parallelism.
        recompute_written_attention: selective recomputation also repeats attention that a model writes out in operators of its own.
        recompute_stops_early: a recomputed block stops at the last operator that saves something, as ``torch.utils.checkpoint`` does
            without reentrance; Megatron-LM runs the whole block again.
        overlap_gradients: sums of gradients run beside the last backward; without, all of them follow it.
        fused_accumulation: over micro-batches the products of weights add to the gradients that are there, as in Megatron-LM; without, each
            gradient is written first and then added.
        keeps_gradients: sums of gradients in a wider dtype stand beside the gradients that they add up, as in DeepSpeed's bfloat16
            optimizer; without, each of those is freed when it has been added.
        keeps_outputs: what a pipeline stage hands on stays in memory until its backward; Megatron-LM frees it
            (``deallocate_pipeline_outputs``), DeepSpeed does not.
        master_gradients: a master copy has gradients in its own dtype beside the sums in a narrower one, as in the float16 optimizers of
            Megatron-LM and DeepSpeed.
        state_ahead: with ZeRO 1 and 2 a rank gathers the parameters of all its stages from the beginning of the step on, beside whatever
            runs, and waits for its sums of gradients at the end only, as Megatron-Core's distributed optimizer; without, a stage waits for
            its own in its first forward and last backward, as FSDP2 does. Gradients are then summed in the buffers that they were made
            in. Without ``overlap_gradients`` both follow the last backward.
        sums_whole: with ZeRO 1 and 2 gradients are summed by an all-reduce, and each rank uses its part of the result, as in DeepSpeed's
            bfloat16 optimizer.
        overlap_products: in backward a collective runs beside the weights' products behind it, as Megatron-LM's asynchronous tensor
            parallelism does.
        overlap_tensor: gathers and scatters over ``tp`` run in as many pieces as there are ranks beside the products that they feed or
            that feed them, all but one piece, as in Transformer Engine's user buffers and torch's asynchronous tensor parallelism.
        overlap_slowdown: how much slower a block computes while a collective over ``tp`` runs beside it, which takes some of the device's
            units and memory bandwidth; Galvatron's profiler measured 1.126 on A100 (Hetu-Galvatron, profile_hardware).
        sends_block: the sender of a message between stages waits until it has arrived, as Megatron-LM does without
            ``overlap_p2p_communication``.
        scatter_gather: of a message that all tensor-parallel ranks would send alike each sends its part, and the receivers gather them
            (Narayanan et al. 2021, section 4.1).
        fragmentation: what the caching allocator loses beside the memory of all tensors, as a share of that. The default is an assumption
            for expandable segments; torch's classical allocator lost 15 % on average over eight models (GMLake, arXiv:2401.08156).
        traffic_bytes: buffers for gradients and parameters on their way, where the framework has its own size for them: DeepSpeed holds
            ``reduce_bucket_size`` and ``allgather_bucket_size``, 5e8 elements each.
    """

    fused: bool = False
    autocast: bool = True
    launch_free: bool = False
    dispatch_s: float = 0.0
    copy_free_collectives: bool = False
    regathers: bool = False
    recompute_written_attention: bool = False
    recompute_stops_early: bool = True
    overlap_gradients: bool = True
    fused_accumulation: bool = False
    keeps_gradients: bool = False
    keeps_outputs: bool = False
    master_gradients: bool = False
    state_ahead: bool = False
    sums_whole: bool = False
    overlap_products: bool = False
    overlap_tensor: bool = False
    overlap_slowdown: float = 1.0
    sends_block: bool = False
    scatter_gather: bool = False
    fragmentation: float = 0.03
    traffic_bytes: int = 0


EAGER = Execution()

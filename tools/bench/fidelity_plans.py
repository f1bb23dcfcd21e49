"""The plan, precision and cluster of a published row.

What a row leaves out is assumed: how its framework ran in ``fidelity_execution.py``, what joined the nodes in :data:`NETWORKS`. Nothing
in these tables is fitted to a step time; a sentence for each assumption goes with the row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hgc.cluster import Cluster
from hgc.errors import HgcError
from hgc.plan import Plan, Precision, Stage
from hgc.strategy import Strategy
from hgc.tools.bench.fidelity_execution import Generation, generation_of
from hgc.tools.bench.fidelity_models import NotRebuilt
from hgc.tools.bench.fidelity_rows import Row

GPUS = {
    "V100-16GB": "v100-16",
    "V100-32GB": "v100-32",
    "A100-40GB": "a100-40",
    "A100-80GB": "a100-80",
    "A800-80GB": "a800",
    "H100-80GB": "h100",
    "H100-96GB-500W": "h100-96-500w",
    "H800-80GB": "h800",
    "H200": "h200",
    "B200": "b200",
    "B300": "b300",
    "GB200": "gb200",
    "GB300": "gb300",
}
"""GPU of a row -> preset."""

NETWORKS = (
    ("bloom", "", "omnipath-4x100", "4 x 100 Gbit/s Omni-Path a node (BLOOM chronicles), of which NCCL reached 140 Gbit/s"),
    ("bigscience", "", "omnipath-4x100-v100", "4 x 100 Gbit/s Omni-Path a node, of which NCCL reached 54 to 85 (BigScience experiments)"),
    ("mosaic", "A100", "roce-8x200", "1600 Gbit/s a node (llm-foundry, benchmarking)"),
    ("internevo", "", "roce-4x100", "4 x 100 Gbit/s RoCE a node (InternEvo, train_performance)"),
    ("ibm_fms", "A100", "roce-4x100", "400 Gbit/s a node (fms-fsdp)"),
    ("ibm_fms", "H100", "roce-8x100", "800 Gbit/s a node (fms-fsdp)"),
    ("torchtitan", "", "roce-8x400", "400 Gbit/s a GPU (torchtitan benchmarks)"),
    ("nanotron", "", "efa-p5", "AWS P5 (ultra-scale playbook)"),
    ("maxtext_a3", "", "gcp-tcpx", "GCP A3 High"),
    ("gpu_recipes_a3ultra", "", "roce-8x400", "GCP A3 Ultra"),
    ("alpa", "", "ethernet-1x25", "AWS p3.16xlarge"),
)
"""Start of dataset, start of GPU -> network preset, and where that is said. Others: what is usually sold with the GPU."""

LARGEST_DOMAIN = 64
"""GPUs of an NVL72 rack that jobs of more than a rack use, so that groups of 8 and 16 divide it."""


@dataclass(frozen=True)
class Layout:
    """Parallel degrees and batch of a row, complete. ``notes``: what was assumed."""

    tp: int
    pp: int
    vpp: int
    cp: int
    dp: int
    mbs: int
    micro_batches: int
    zero: int
    notes: tuple[str, ...] = ()


SHARDING = (("distributed_optimizer", 1), ("zero0", 0), ("zero1", 1), ("zero2", 2), ("zero3", 3), ("fsdp_shard_grad_op", 2), ("fsdp", 3))
"""Start of a row's ``sharding`` -> ZeRO stage."""


def layout_of(row: Row, layers: int) -> Layout:
    """Raises :class:`NotRebuilt` if degrees are missing or do not fit the devices."""
    tp, pp, notes = _degrees(row)
    cp = row.cp or 1
    if not row.gpus:
        raise NotRebuilt("the source does not state how many GPUs")
    if not tp or not pp:
        raise NotRebuilt(f"tp is {tp} and pp is {pp}; a degree is 1 or more")
    if row.gpus % (tp * pp * cp):
        raise NotRebuilt(f"tp {tp} x pp {pp} x cp {cp} does not divide {row.gpus} GPUs")
    dp = row.gpus // (tp * pp * cp)
    if row.dp is not None and row.dp != dp:
        raise NotRebuilt(f"dp {row.dp} is stated, but {row.gpus} GPUs / (tp {tp} x pp {pp} x cp {cp}) is {dp}")
    mbs = row.mbs or 1
    notes += [] if row.mbs else ["the micro-batch is not stated, one sequence assumed"]
    gbs = row.gbs or dp * mbs * pp
    notes += [] if row.gbs else [f"the global batch is not stated, {gbs} assumed: as many micro-batches as stages"]
    if gbs % (dp * mbs):
        raise NotRebuilt(f"dp {dp} x micro-batch {mbs} does not divide the global batch {gbs}")
    micro_batches = gbs // (dp * mbs)
    vpp, said = _virtual(row, pp, layers, micro_batches)
    zero, cut = _zero(row, dp)
    return Layout(tp, pp, vpp, cp, dp, mbs, micro_batches, zero, (*notes, *said, *cut))


def _degrees(row: Row) -> tuple[int, int, list[str]]:
    """tp and pp, from the notes where the columns are empty."""
    if row.tp is not None and row.pp is not None:
        return row.tp, row.pp, []
    split = re.search(r"TP(\d+)\s*[x/]\s*PP(\d+)", row.notes)
    if split:
        return int(split[1]), int(split[2]), ["tp and pp are taken from the notes"]
    if "no tensor/pipeline parallelism" in row.notes:
        return 1, 1, []
    raise NotRebuilt(f"the source does not state {' and '.join(name for name in ('tp', 'pp') if getattr(row, name) is None)}")


def _virtual(row: Row, pp: int, layers: int, micro_batches: int) -> tuple[int, list[str]]:
    if row.vpp is not None or pp == 1:
        return row.vpp or 1, []
    if not generation_of(row).interleaves or micro_batches % pp or layers % pp:
        return 1, []
    vpp = layers // pp
    return vpp, [f"virtual stages are not stated, {vpp} assumed: one layer each, as NeMo's recipes"] if vpp > 1 else []


def _zero(row: Row, dp: int) -> tuple[int, list[str]]:
    """ZeRO stage, and a note if the source shards over a part of dp only, which a plan cannot say."""
    zero = next((stage for word, stage in SHARDING if row.sharding.startswith(word)), 0)
    zero = zero if dp > 1 else 0
    group = re.search(r"\((?:group=)?(\d+)\)", row.sharding)
    partly = row.sharding in ("hsdp", "fsdp+dp") or (group is not None and int(group[1]) < dp)
    return zero, [f"{row.sharding} shards over a part of the {dp} data-parallel ranks; the plan shards over all"] if partly and zero else []


def stage_layers(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage: equal; or embedding and loss count as one each; or the first stages have one more (DeepSpeed's uniform cut)."""
    if layers % stages == 0:
        return (layers // stages,) * stages
    if (layers + 2) % stages == 0 and stages > 2:
        each = (layers + 2) // stages
        return (each - 1, *(each,) * (stages - 2), each - 1)
    each, more = divmod(layers, stages)
    return tuple(each + (index < more) for index in range(stages))


def precision_of(row: Row, generation: Generation, layout: Layout) -> Precision:
    """Dtypes by the row's ``precision``; FSDP keeps float32 shards, the others 16-bit parameters and a float32 copy."""
    words = row.precision.lower()
    compute = "float16" if words.startswith("fp16") else "bfloat16"
    products = "float8" if "fp8" in words or "fp8" in row.features else "float4" if "fp4" in words else ""
    if layout.zero >= 2 and generation.name != "DeepSpeed 2020-2022" and "PURE" not in row.features:
        return Precision(compute=compute, parameters="float32", gradients="float32", products=products)
    if "PURE" in row.features:
        return Precision(compute=compute, parameters=compute, gradients=compute, products=products)
    gradients = generation.gradients if compute == "float16" or generation.gradients == "bfloat16" else "float32"
    return Precision(compute=compute, parameters=compute, master="float32", gradients=gradients, products=products)


def plan_of(row: Row, layout: Layout, generation: Generation, layers: int, recompute: str) -> Plan:
    """The row's plan, for a program with one block in front of its layers and one behind them."""
    strategy = Strategy(
        dp=layout.dp,
        tp=layout.tp,
        cp=layout.cp,
        zero=layout.zero,
        sequence_parallel=generation.sequence_parallel and layout.tp > 1,
        recompute=recompute,
    )
    stages = _stages(layout, strategy, layers)
    schedule = "interleaved" if layout.vpp > 1 else "1f1b"
    return Plan(strategy, stages, schedule, layout.micro_batches, precision_of(row, generation, layout))


def _stages(layout: Layout, strategy: Strategy, layers: int) -> tuple[Stage, ...]:
    count = layout.pp * layout.vpp
    if count == 1:
        return ()
    if layers < count - 2:
        raise NotRebuilt(f"{layers} layers are too few for {count} stages")
    blocks = list(stage_layers(layers, count))
    blocks[0] += 1
    blocks[-1] += 1
    if min(blocks) < 1:
        raise NotRebuilt(f"{layers} layers are too few for {count} stages")
    return tuple(Stage(number, index % layout.pp * strategy.devices) for index, number in enumerate(blocks))


def recompute_of(row: Row) -> str:
    """What is known of recomputation; "": nothing. Rules that repeat some operators count as the core of attention, but torchtitan's
    ``selective_op``, which repeats every second product and all between, as everything."""
    if not row.recompute:
        return generation_of(row).recompute
    return {"full": "full", "none": "none", "minimal_flash": "none", "selective_op": "full"}.get(row.recompute, "selective")


def cluster_of(row: Row) -> tuple[Cluster, tuple[str, ...]]:
    """The row's devices in nodes, and what was assumed. Raises :class:`NotRebuilt` for a GPU without a preset."""
    if row.gpu not in GPUS:
        raise NotRebuilt(f"there is no preset for the GPU {row.gpu!r}")
    gpus = row.gpus or 1
    network, notes = network_of(row)
    try:
        per_node = _per_node(row, gpus)
        cluster = Cluster.preset(GPUS[row.gpu], nodes=-(-gpus // per_node), per_node=per_node, network=network)
    except HgcError as wrong:
        raise NotRebuilt(f"its cluster cannot be described: {wrong}") from None
    return cluster, notes


def _per_node(row: Row, gpus: int) -> int:
    if row.gpu.startswith("GB"):
        return min(gpus, LARGEST_DOMAIN) if gpus % LARGEST_DOMAIN == 0 or gpus <= 72 else row.gpus_per_node or 4
    usual = row.gpus_per_node or 8
    return usual if gpus >= usual else gpus


def network_of(row: Row) -> tuple[str | None, tuple[str, ...]]:
    for dataset, gpu, network, source in NETWORKS:
        if row.dataset.startswith(dataset) and row.gpu.startswith(gpu):
            return network, (f"network {network}: {source}",)
    return None, ()


def blocks_around(paths: Sequence[str]) -> tuple[int, int]:
    """Blocks in front of the first layer and behind the last, from the paths of a traced program's blocks."""
    inside = [index for index, path in enumerate(paths) if re.fullmatch(r"layers\.\d+", path)]
    return inside[0], len(paths) - 1 - inside[-1]

"""Galvatron's public profiles as search problems, and the recorded results of its engine.

The folder has ``models``, ``hardware`` and ``results.csv``, as its README describes: MiB, milliseconds, and GB/s of bus bandwidth.
Embedding and output layers are left out, so predicted times are not those of the engine to the digit.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hgc.errors import ArtifactError
from hgc.passes.sharding.search.galvatron import Layer, Machine, Training, pipeline
from hgc.passes.sharding.search.pipeline import Pipeline
from hgc.passes.sharding.search.space import trees

_MIB, _MS, _GB = 2**20, 1e-3, 1e9
_LIMITED_ABOVE_GB, _SHARE = 20, 0.8
"""The engine uses only so much of a budget above 20 GB."""


@dataclass(frozen=True)
class Profiled:
    """Where a model's profile is, and its sizes."""

    files: str
    layers: int
    hidden: int
    sequence: int


PROFILES = {
    "bert-base": Profiled("v2.4.0__bert_hf__{}_profiling_bf16_hidden768_head12.json", 12, 768, 512),
    "bert-large": Profiled("v2.4.0__bert_hf__{}_profiling_bf16_hidden1024_head16.json", 24, 1024, 512),
    "gpt-6.7b": Profiled("v2.4.0__gpt_hf__{}_profiling_bf16_hidden4096_head32_seqlen2048.json", 32, 4096, 2048),
    "llama-7b": Profiled("v2.4.0__llama_hf__{}_profiling_bf16_hidden4096_head32_seqlen2048.json", 32, 4096, 2048),
}


@dataclass(frozen=True)
class Recorded:
    """A search of the public engine with its own core."""

    model: str
    gpus: int
    budget_gb: float
    samples: int
    throughput: float
    cpu_s: float
    plan: str


def recorded(folder: Path) -> Iterator[Recorded]:
    """Searches of the public core whose profiles are in the folder. Raises ``ArtifactError`` without a ``results.csv``."""
    path = folder / "results.csv"
    if not path.is_file():
        raise ArtifactError(f"{folder} has no results.csv; give the folder of Galvatron's profiles, with models, hardware and results.csv")
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            gpus = int(row["gpus"])
            if row["core"] == "public" and row["sp_space"] == "tp" and row["model"] in PROFILES and gpus <= 16:
                numbers = float(row["budget_GB"]), int(row["bsz"]), float(row["thr"]), float(row["cpu_s"])
                yield Recorded(row["model"], gpus, *numbers, row["plan"])


def problems(folder: Path, row: Recorded) -> list[Pipeline]:
    """What the engine searched: all stages up to 8, tensor parallelism up to 8, all micro-batch counts that divide the batch."""
    profile, machine = PROFILES[row.model], _machine(folder, row.gpus)
    layers = (_layer(folder, profile),) * profile.layers
    share = _SHARE if row.budget_gb > _LIMITED_ABOVE_GB else 1.0
    limit = row.budget_gb * 2**30 * share - 2**30  # the engine adds 1024 MiB of context to each stage
    counts = [count for count in range(1, row.samples + 1) if row.samples % count == 0]
    found = []
    for stages in (stages for stages in (1, 2, 4, 8) if stages <= min(row.gpus, profile.layers)):
        chosen = [tree for tree in trees(row.gpus) if tree.stages == stages and tree.degree("tp") <= 8]
        training = [Training(row.samples, count, gradient_bytes=2, zero2=True) for count in counts if count >= stages]
        found += [pipeline(layers, chosen, machine, each, limit) for each in training]
    return found


def _layer(folder: Path, profile: Profiled) -> Layer:
    memory = _json(folder / "models" / profile.files.format("memory"))["layertype_0_sp"]
    memory = memory.get(str(profile.sequence), memory)
    times = _json(folder / "models" / profile.files.format("computation"))
    key = f"layertype_0_bsz1_seq{profile.sequence}" if f"layertype_0_bsz1_seq{profile.sequence}" in times else "layertype_0_bsz8"
    kept: dict[str, float] = memory["tp_activation_per_bsz_dict"]
    return Layer(
        forward_s=times[key] * _MS,
        parameter_bytes=memory["parameter_size"] * _MIB,
        activation_bytes={int(tp): size * _MIB for tp, size in kept.items() if tp != "checkpoint"},
        boundary_bytes=kept["checkpoint"] * _MIB,
        output_bytes=profile.hidden * profile.sequence * 2,
    )


def _machine(folder: Path, gpus: int) -> Machine:
    where = f"{max(gpus // 8, 1)}nodes_{min(gpus, 8)}gpus_per_node.json"
    hardware = folder / "hardware"
    reduce = _json(hardware / f"allreduce_bandwidth_{where}")
    found = {(int(m[1]), m[2] == "1"): value * _GB for key, value in reduce.items() if (m := re.fullmatch(r".*_(\d+)_consec_([01])", key))}
    messages = {int(key.rsplit("_", 1)[1]): value * _GB for key, value in _json(hardware / f"p2p_bandwidth_{where}").items()}
    return Machine(gpus, found, messages, _json(hardware / "overlap_coefficient.json")["overlap_coe"])


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); expected a profile of Galvatron, as its README describes") from None
    return content

"""Galvatron's public profiles as search problems, and the recorded results of its engine.

The folder has ``models``, ``hardware`` and ``results.csv``, as its README describes: MiB, milliseconds, and GB/s of bus bandwidth.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hgc.errors import ArtifactError
from hgc.passes.sharding.search.galvatron import Ends, Layer, Machine, Training, pipeline
from hgc.passes.sharding.search.pipeline import Pipeline
from hgc.passes.sharding.search.space import Tree, trees

_MIB, _MS, _GB = 2**20, 1e-3, 1e9
_LIMITED_ABOVE_GB, _SHARE = 20, 0.8
"""The engine uses only so much of a budget above 20 GB."""
CONTEXT_BYTES = 2**30
"""The engine adds so much to each stage."""
_FITTED = 8
"""Profiled batches or lengths from which on the engine fits a line or a parabola."""
_MOST_STAGES, _PER_NODE = 8, 8


@dataclass(frozen=True)
class Profiled:
    """Where a model's profile is, and its sizes. ``layers``: of each type in order, with ``sequences`` and ``hidden`` of each type.

    ``suffix``: of the memory keys, ``"_sp"`` with Megatron-LM's sequence parallelism. ``all_reduces``: of each type.
    """

    files: str
    layers: tuple[int, ...]
    hidden: tuple[int, ...]
    sequences: tuple[int, ...]
    suffix: str = "_sp"
    all_reduces: tuple[int, ...] = (4,)


PROFILES = {
    "bert-base": Profiled("v2.4.0__bert_hf__{}_profiling_bf16_hidden768_head12.json", (12,), (768,), (1024,)),
    "bert-large": Profiled("v2.4.0__bert_hf__{}_profiling_bf16_hidden1024_head16.json", (24,), (1024,), (1024,)),
    "gpt-6.7b": Profiled("v2.4.0__gpt_hf__{}_profiling_bf16_hidden4096_head32_seqlen2048.json", (32,), (4096,), (2048,)),
    "llama-7b": Profiled("v2.4.0__llama_hf__{}_profiling_bf16_hidden4096_head32_seqlen2048.json", (32,), (4096,), (2048,)),
    "vit-huge": Profiled("v2.4.0__vit_hf__{}_profiling_bf16_hidden1280_head16.json", (32,), (1280,), (197,), ""),
    "t5-3B": Profiled("v2.4.0__T5__{}_profiling_bf16_t5-3B.json", (24, 24), (1024, 1024), (512, 512), "_sp", (4, 6)),
    "swin-huge": Profiled(
        "v2.4.0__swin__{}_profiling_bf16_swin-huge.json", (2, 2, 42, 2), (320, 640, 1280, 2560), (3136, 784, 196, 49), "", (4, 4, 4, 4)
    ),
}
LEFT_OUT = ("reshard cost fixed", "no 20% reserve")
"""Tags of rows in which the engine was changed."""


@dataclass(frozen=True)
class Recorded:
    """A search of the public engine. ``own_core``: with its own dynamic programme, so that ``cpu_s`` is what it takes.

    ``plan``: of each run of layers ``pp-tp-dp``. ``cuts``: layers of each stage; ``vocabulary_tp``: of embedding and output layer.
    """

    model: str
    gpus: int
    budget_gb: float
    samples: int
    throughput: float
    cpu_s: float
    plan: str
    own_core: bool
    micro_batches: int
    cuts: tuple[int, ...]
    vocabulary_tp: int
    memory_mib: tuple[float, ...]
    most_tp: int
    tag: str = ""

    @property
    def name(self) -> str:
        return f"{self.model}, {self.gpus} GPUs, {self.budget_gb:g} GB, batch {self.samples}"


def recorded(folder: Path) -> Iterator[Recorded]:
    """Searches in the folder's ``results.csv`` without Ulysses, by the unchanged engine or an equivalent core.

    Raises ``ArtifactError`` without the file.
    """
    path = folder / "results.csv"
    if not path.is_file():
        raise ArtifactError(f"{folder} has no results.csv; give the folder of Galvatron's profiles, with models, hardware and results.csv")
    with path.open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["sp_space"] == "tp" and row["model"] in PROFILES and row["tag"] not in LEFT_OUT:
                limit = re.search(r"max_tp (\d+)", row["tag"])
                numbers = float(row["budget_GB"]), int(row["bsz"]), float(row["thr"]), float(row["cpu_s"] or 0)
                parts = int(row["chunks"]), tuple(json.loads(row["stages"])), int(row["vtp"]), tuple(json.loads(row["mem_MB"]))
                most_tp = int(limit[1]) if limit else _PER_NODE
                own = row["core"] == "public"
                yield Recorded(row["model"], int(row["gpus"]), *numbers, row["plan"], own, *parts, most_tp, row["tag"])


def limit_bytes(row: Recorded) -> float:
    """For layers, embedding and output layer."""
    share = _SHARE if row.budget_gb > _LIMITED_ABOVE_GB else 1.0
    return row.budget_gb * 2**30 * share - CONTEXT_BYTES


def problems(folder: Path, row: Recorded) -> list[Pipeline]:
    """What the engine searched: all stages up to 8, its tensor-parallel degrees for layers and for the ends, all micro-batch counts that
    divide the batch (as many as stages at least: with fewer some stage only waits)."""
    counts = [count for count in range(1, row.samples + 1) if row.samples % count == 0]
    made = Problems(folder, row)
    return [
        made.problem(stages, count, vocabulary_tp)
        for stages in (1, 2, 4, 8)
        if stages <= min(row.gpus, sum(PROFILES[row.model].layers))
        for vocabulary_tp in made.vocabulary_degrees(stages)
        for count in counts
        if count >= stages and count * (row.gpus // stages // max(row.most_tp, vocabulary_tp)) <= row.samples
    ]


class Problems:
    """Search problems of one model and machine; files are read once."""

    def __init__(self, folder: Path, row: Recorded) -> None:
        self.row = row
        profile = PROFILES[row.model]
        self._memory = _json(folder / "models" / profile.files.format("memory"))
        self._times = _json(folder / "models" / profile.files.format("computation"))
        made = [self._layer(profile, kind) for kind in range(len(profile.layers))]
        self._layers = tuple(layer for layer, count in zip(made, profile.layers, strict=True) for _ in range(count))
        self._ends = self._read_ends(profile)
        self._machine = _machine(folder, row.gpus)

    def problem(self, stages: int, micro_batches: int, vocabulary_tp: int) -> Pipeline:
        training = Training(self.row.samples, micro_batches, gradient_bytes=2, zero2=True)
        limit = limit_bytes(self.row)
        return pipeline(self._layers, self.strategies(stages), self._machine, training, limit, self._ends, vocabulary_tp)

    def strategies(self, stages: int) -> list[Tree]:
        return [tree for tree in trees(self.row.gpus) if tree.stages == stages and tree.degree("tp") <= self.row.most_tp]

    def vocabulary_degrees(self, stages: int) -> list[int]:
        known = set(self._ends.alone) if stages == 1 else set(self._ends.first) & set(self._ends.last)
        return sorted(degree for degree in known if degree <= min(self.row.gpus // stages, self.row.most_tp))

    def _layer(self, profile: Profiled, kind: int) -> Layer:
        memory = self._memory[f"layertype_{kind}{profile.suffix}"]
        memory = memory.get(str(profile.sequences[kind]), memory)
        kept: dict[str, float] = memory["tp_activation_per_bsz_dict"]
        forward_s, launch_s = _seconds(self._times, f"layertype_{kind}", profile.sequences[kind])
        return Layer(
            forward_s=forward_s,
            launch_s=launch_s,
            parameter_bytes=memory["parameter_size"] * _MIB,
            activation_bytes={int(tp): size * _MIB for tp, size in kept.items() if tp != "checkpoint"},
            boundary_bytes=kept["checkpoint"] * _MIB,
            output_bytes=profile.hidden[kind] * profile.sequences[kind] * 2,
            all_reduces=profile.all_reduces[kind] if len(profile.all_reduces) > 1 else 4,
        )

    def _read_ends(self, profile: Profiled) -> Ends:
        def read(where: str) -> dict[int, tuple[float, float]]:
            found = self._memory[f"other_memory_pp_{where}{profile.suffix}"]
            found = found if "model_states" in found else _of_length(found, profile.sequences)
            states, kept = found["model_states"], found["activation"]
            return {int(tp): (size * _MIB, kept[tp] * _MIB) for tp, size in states.items()}

        forward_s, launch_s = _seconds(self._times, "layertype_other", profile.sequences[0])
        output_bytes = profile.hidden[0] * profile.sequences[0] * 2
        return Ends(forward_s, read("off"), read("on_first"), read("on_last"), output_bytes, launch_s)


def _of_length(found: Mapping[str, Any], sequences: tuple[int, ...]) -> dict[str, Any]:
    name = str(sequences[0]) if str(sequences[0]) in found else "[" + ",".join(map(str, sequences)) + "]"
    entry: dict[str, Any] = found[name]
    return entry


def _seconds(times: Mapping[str, float], start: str, sequence: int) -> tuple[float, float]:
    """Of one sample, and of none: a line through batches, or a parabola through lengths, where enough of them were profiled; else the
    first value."""
    found = [(m, value) for key, value in times.items() if (m := re.fullmatch(rf"{start}(?:_0)?_bsz(\d+)(?:_seq(\S+))?", key))]
    batches = {int(match[1]): int(match[1]) * value for match, value in found}
    lengths = {int(match[2]): value for match, value in found if (match[2] or "").isdecimal()}
    if len(batches) >= _FITTED:
        slope, launch = np.polyfit(list(batches), list(batches.values()), 1)
        return float(slope) * _MS, float(launch) * _MS
    if len(lengths) >= _FITTED:
        return float(np.polyval(np.polyfit(list(lengths), list(lengths.values()), 2), sequence)) * _MS, 0.0
    return found[0][1] * _MS, 0.0


def _machine(folder: Path, gpus: int) -> Machine:
    """Of more than two nodes nothing was measured: a group's bandwidth is that of two nodes with as many members in each."""
    where = f"{min(max(gpus // _PER_NODE, 1), 2)}nodes_{min(gpus, _PER_NODE)}gpus_per_node.json"
    hardware = folder / "hardware"
    reduce = _json(hardware / f"allreduce_bandwidth_{where}")
    found = {(int(m[1]), m[2] == "1"): value * _GB for key, value in reduce.items() if (m := re.fullmatch(r".*_(\d+)_consec_([01])", key))}
    messages = {int(key.rsplit("_", 1)[1]): value * _GB for key, value in _json(hardware / f"p2p_bandwidth_{where}").items()}
    if gpus > 2 * _PER_NODE:
        found = {(ranks, near): _by_members(found, gpus, ranks, near) for ranks in _powers(gpus) for near in (True, False)}
    return Machine(gpus, found, messages, _json(hardware / "overlap_coefficient.json")["overlap_coe"])


def _by_members(two_nodes: Mapping[tuple[int, bool], float], gpus: int, ranks: int, near: bool) -> float:
    if near and ranks <= _PER_NODE:
        return two_nodes[ranks, True]
    members = _PER_NODE if near else max(ranks * _PER_NODE // gpus, 1)
    return two_nodes[2 * members, members == _PER_NODE]


def _powers(gpus: int) -> list[int]:
    return [1 << power for power in range(1, gpus.bit_length())]


def _json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArtifactError(f"{path} cannot be read ({error}); expected a profile of Galvatron, as its README describes") from None
    return content

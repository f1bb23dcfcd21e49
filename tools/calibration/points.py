"""Microbenchmarks as arrays: products of matrices, and sweeps of collectives over message sizes."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hgc import records
from hgc.errors import HgcError

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Products:
    """Timed products of one device: ``batch`` times (m, k) by (k, n), and the sweep that each point is of."""

    m: Array
    n: Array
    k: Array
    batch: Array
    measured_s: Array
    groups: tuple[str, ...]

    def select(self, keep: NDArray[np.bool_]) -> Products:
        names = tuple(name for name, kept in zip(self.groups, keep, strict=True) if kept)
        return Products(self.m[keep], self.n[keep], self.k[keep], self.batch[keep], self.measured_s[keep], names)


@dataclass(frozen=True)
class Sweep:
    """One collective over message sizes, on one machine.

    ``busy``: devices of each node that sent at the same time, in groups like this one; 0 for those of this group alone.
    """

    collective: str
    gpu: str
    ranks: int
    nodes: int
    inter_link: str
    algorithm: str
    source: str
    size_bytes: Array
    measured_s: Array
    busy: int = 0


def read(folder: Path, name: str) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    text = records.read_text(folder / name, "data file", HgcError)
    return list(csv.DictReader(text.splitlines()))


def products(rows: Iterable[dict[str, str]], gpu: str, kinds: Iterable[str], operators: Iterable[str] = ()) -> Products:
    """Points of one GPU; ``operators`` limits them to names that start with one of these."""
    chosen = [row for row in rows if row["gpu"] == gpu and row["kind"] in set(kinds) and row["m"]]
    if operators:
        chosen = [row for row in chosen if row["op"].startswith(tuple(operators))]
    m, n, k, batch, rate = (np.array([float(row[name]) for row in chosen]) for name in ("m", "n", "k", "batch", "tflops"))
    groups = tuple(f"{row['op']} {row['source'].rsplit('/', 1)[-1].split(' line')[0]}" for row in chosen)
    return Products(m, n, k, batch, 2 * m * n * k * batch / (rate * 1e12), groups)


def sweeps(rows: Iterable[dict[str, str]]) -> list[Sweep]:
    """Rows of ``nccl_bandwidth.csv`` by machine, collective, algorithm and source, without warm-up outliers.

    Rows that print a bandwidth but no size (plateaus of large messages) count as messages of 8 GiB.
    """
    found: dict[tuple[str, ...], list[tuple[float, float]]] = {}
    for row in rows:
        name = {"alltoall": "all_to_all", "sendrecv": "send"}.get(row["collective"], row["collective"])
        key = (name, row["gpu"], row["gpus"], row["nodes"], row["inter_link"], row["algo"], row["source"])
        size = float(row["size_bytes"] or 2**33)
        found.setdefault(key, []).append((size, float(row["time_us"]) * 1e-6 if row["time_us"] else _plateau_s(name, size, row)))
    made = []
    for (name, gpu, ranks, nodes, link, algorithm, source), pairs in found.items():
        sizes, seconds = (np.array(column) for column in zip(*sorted(pairs), strict=True))
        steady = np.array([second <= 1.3 * seconds[index:].min() for index, second in enumerate(seconds)])
        made.append(Sweep(name, gpu, int(ranks), int(nodes), link, algorithm, source, sizes[steady], seconds[steady]))
    return made


def _plateau_s(collective: str, size: float, row: dict[str, str]) -> float:
    """Time from the bus bandwidth, by the definitions of nccl-tests."""
    ranks = int(row["gpus"])
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "send": 1.0}.get(collective, (ranks - 1) / ranks)
    return size * factor / (float(row["busbw_gbps"]) * 1e9)

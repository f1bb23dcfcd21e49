"""Published training runs as typed rows: CSV files with the columns of ``training_throughput.csv``, read strictly.

Every file with those columns is read, others are skipped; an empty cell means that the source does not say. Errors name file, line
and column.
"""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

from hgc import records
from hgc.errors import HgcError

ARCHITECTURES = "model_architectures.csv"
"""Shapes of models, looked up by ``arch`` where a row leaves them out; read where it lies beside the rows."""
MARKS = ("id", "dataset", "gpu", "gpus", "step_time_s", "step_time_kind")
"""A file whose header has all of these holds rows; it must then have the other columns too."""


@dataclass(frozen=True)
class Row:
    """One published run. ``None`` or ``""``: not stated. ``mbs``, ``gbs``: sequences. ``mem_gib``: as printed. ``place``: file, line."""

    id: str
    dataset: str
    framework: str
    model: str
    arch: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    ffn: int | None
    vocab: int | None
    seq_len: int | None
    gpu: str
    gpus: int | None
    gpus_per_node: int | None
    precision: str
    task: str
    tp: int | None
    pp: int | None
    vpp: int | None
    cp: int | None
    ep: int | None
    dp: int | None
    sharding: str
    mbs: int | None
    gbs: int | None
    recompute: str
    step_time_s: float | None
    step_time_kind: str
    mem_gib: float | None
    features: str
    notes: str
    place: str = ""

    @property
    def ran_out_of_memory(self) -> bool:
        return "oom" in self.features.split()


@dataclass(frozen=True)
class Shape:
    """What ``model_architectures.csv`` says of one model; ``None``: nothing."""

    arch: str
    layers: int | None
    hidden: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    ffn: int | None
    vocab: int | None
    gated_mlp: int | None
    n_experts: int | None
    seq_len_default: int | None
    tied_embeddings: int | None


def read(data: Path) -> tuple[list[Row], dict[str, Shape]]:
    """Rows of a file, or of all files of a folder that have the columns, and shapes by ``arch``.

    Raises ``HgcError`` for a file that cannot be read, that lacks a column, or for a cell that is no number where one belongs.
    """
    if not data.exists():
        raise HgcError(f"there is no file or folder {str(data)!r}; give --data a CSV of published rows, or a folder of them")
    files = sorted(data.glob("*.csv")) if data.is_dir() else [data]
    rows = [row for file in files for row in _rows(file, must=not data.is_dir())]
    if not rows:
        raise HgcError(f"{str(data)!r} holds no published rows; expected a CSV with the columns {', '.join(_columns(Row))}")
    return rows, _shapes((data if data.is_dir() else data.parent) / ARCHITECTURES)


def _rows(file: Path, must: bool) -> list[Row]:
    header, cells = _table(file)
    if not must and not set(MARKS) <= set(header):
        return []
    _check_header(file, header, Row)
    return [Row(**_typed(Row, row, file, line), place=f"{file.name}, line {line}") for line, row in cells]


def _shapes(file: Path) -> dict[str, Shape]:
    if not file.exists():
        return {}
    header, cells = _table(file)
    _check_header(file, header, Shape)
    shapes = (Shape(**_typed(Shape, row, file, line)) for line, row in cells)
    return {shape.arch: shape for shape in shapes}


def _table(file: Path) -> tuple[list[str], list[tuple[int, dict[str, str]]]]:
    """Header, and rows with the line that each starts on."""
    reader = csv.reader(io.StringIO(records.read_text(file, "data file", HgcError), newline=""))
    header = next(reader, [])
    found, start = [], reader.line_num + 1
    for cells in reader:
        if cells and len(cells) != len(header):
            raise HgcError(
                f"{file}, line {start}: the row has {len(cells)} cells and the header {len(header)}; quote cells that hold commas"
            )
        if cells:
            found.append((start, dict(zip(header, cells, strict=True))))
        start = reader.line_num + 1
    return header, found


def _columns(kind: type[Any]) -> list[str]:
    return [field.name for field in fields(kind) if field.name != "place"]


def _check_header(file: Path, header: list[str], kind: type[Any]) -> None:
    missing = [name for name in _columns(kind) if name not in header]
    if missing:
        raise HgcError(f"{file} has no column {missing[0]!r}; add it, with empty cells where nothing is known")


def _typed(kind: type[Any], cells: dict[str, str], file: Path, line: int) -> dict[str, Any]:
    kinds = get_type_hints(kind)
    return {name: _cell(kinds[name], cells[name].strip(), f"{file}, line {line}, column {name!r}") for name in _columns(kind)}


def _cell(kind: Any, text: str, where: str) -> Any:
    if kind is str:
        return text
    if not text:
        return None
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf") or (kind == int | None and number != int(number)):
        wanted = "a whole number" if kind == int | None else "a number"
        raise HgcError(f"{where}: {text!r} is not {wanted} of 0 or more; leave the cell empty if nothing is known")
    return int(number) if kind == int | None else number

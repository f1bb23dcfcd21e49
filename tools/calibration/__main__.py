"""Command line of the calibration: fits, prints residuals, and writes the constants into the packaged presets if asked to."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.markup import escape
from rich.table import Table

from hgc import cluster, records
from hgc.cluster import DevicePreset, Kernels, NetworkPreset
from hgc.errors import HgcError
from hgc.tools.calibration import kernels, layers, networks
from hgc.tools.calibration.points import Array, read, sweeps
from hgc.tools.calibration.stated import STATED
from hgc.tools.console import heading, say, table

GPU_PRESETS = tuple(name for name in cluster.presets() if name != "cpu")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m hgc.tools.calibration", description=__doc__)
    parser.add_argument("data", type=Path, help="folder with matmul_efficiency.csv, transformer_layer_a100.csv, nccl_bandwidth.csv")
    parser.add_argument("--write", action="store_true", help="write the constants into hgc/cost/presets")
    request = parser.parse_args(arguments)
    try:
        return run(request.data, request.write)
    except HgcError as wrong:
        print(f"error: {wrong}", file=sys.stderr)
        return 2


def run(data: Path, write: bool) -> int:
    devices = {name: cluster.device_preset(name) for name in GPU_PRESETS}
    joined = {name: cluster.network_preset(name) for name in cluster.presets("network")}
    bare = {
        name: replace(found.node.device, kernels=Kernels(units=found.node.device.kernels.units, launch_s=kernels.LAUNCH_S))
        for name, found in devices.items()
    }
    constants, products = kernels.calibrate(data, bare)
    measured = [*sweeps(read(data, "nccl_bandwidth.csv")), *STATED]
    nodes = {name: found.node for name, found in devices.items()}
    links = networks.calibrate(measured, nodes, {name: (found.link, found.uplinks) for name, found in joined.items()})
    heading("Products")
    table(_table(row for name, (times, points) in products.items() for row in _by_group(name, times, points.measured_s, points.groups)))
    heading("Transformer layers on A100 (not fitted)")
    device = replace(bare["a100-40"], kernels=constants["a100-40"])
    table(_table(_row(name, times, seconds) for name, times, seconds in layers.check(data, device)))
    heading("Collectives")
    table(_table(_link_rows(links)))
    if write:
        _write_devices(devices, constants, links)
        _write_networks(joined, links)
        say(f"\nwrote {len(devices) + len(joined)} presets")
    return 0


def _write_devices(devices: dict[str, DevicePreset], constants: dict[str, Kernels], links: list[networks.Fitted]) -> None:
    for name, found in devices.items():
        fit = next(fit for fit in links if fit.target.network is None and fit.target.device == name)
        node = replace(found.node, device=replace(found.node.device, kernels=constants[name]), link=fit.link)
        cited = kernels.SOURCES.get(name[:7], kernels.SOURCES.get(name[:4], kernels.SOURCES["other"]))
        _write("device", name, replace(found, node=node, sources=_sources(found.sources, cited, _cited(fit))))


def _write_networks(joined: dict[str, NetworkPreset], links: list[networks.Fitted]) -> None:
    for name, found in joined.items():
        fit = next((fit for fit in links if fit.target.network == name), None)
        if fit:
            _write("network", name, replace(found, link=fit.link, sources=_sources(found.sources, _cited(fit))))


def _sources(old: tuple[str, ...], *cited: str) -> tuple[str, ...]:
    return (*(text for text in old if not text.startswith(("kernels ", "link "))), *cited)


def _cited(fit: networks.Fitted) -> str:
    """``link fitted to nccl_bandwidth.csv: ...; otherwise as a100-80``; or ``link fitted to`` what sources state."""
    stated = {sweep.source for sweep in STATED}
    rows = sorted({sweep.source for sweep, _ in fit.residuals})
    file = "" if set(rows) <= stated else "nccl_bandwidth.csv: "
    parts = [f"link fitted to {file}{', '.join(rows)}"] if rows else []
    return "; ".join(parts + ([f"{'otherwise' if rows else 'link'} as {fit.target.like}"] if fit.target.like else []))


def _table(rows: Iterable[list[str]]) -> Table:
    """Of |predicted / measured - 1|: median and 90th percentile; bias is the median with its sign."""
    made = Table("", *HEADER, box=None, header_style="dim")
    for row in rows:
        made.add_row(*map(escape, row))
    return made


HEADER = ("points", "median", "p90", "bias")


def _row(name: str, predicted: Array, measured: Array) -> list[str]:
    ratio = predicted / measured - 1
    spread = np.quantile(np.abs(ratio), [0.5, 0.9])
    return [name, str(len(ratio)), *(f"{100 * value:.1f} %" for value in (*spread, float(np.median(ratio))))]


def _by_group(name: str, predicted: Array, measured: Array, groups: tuple[str, ...]) -> Iterator[list[str]]:
    yield _row(name, predicted, measured)
    for group in dict.fromkeys(groups):
        kept = np.array([other == group for other in groups])
        yield _row(f"  {group}", predicted[kept], measured[kept])


def _link_rows(links: list[networks.Fitted]) -> Iterator[list[str]]:
    for fit in links:
        for sweep, predicted in fit.residuals:
            yield _row(f"{fit.target.network or fit.target.device}: {networks.label(sweep)}", predicted, sweep.measured_s)


def _write(kind: str, name: str, preset: DevicePreset | NetworkPreset) -> None:
    folder = Path(str(cluster.preset_folder(kind)))
    text = json.dumps(_shorter(records.encode(preset)), indent=2, ensure_ascii=False) + "\n"
    records.write_text(folder / f"{name}.json", text, "preset", HgcError)


def _shorter(value: object) -> object:
    """Without keys that are null, whose defaults are null too."""
    if isinstance(value, dict):
        return {key: _shorter(item) for key, item in value.items() if item is not None}
    return [_shorter(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())

"""``torchrun ... -m hgc.tools.profile -o cluster.json``: every rank measures, rank 0 writes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch.distributed as dist
from rich.table import Table

from hgc.errors import HgcError
from hgc.runtime.mesh import leave
from hgc.tools.console import say, table
from hgc.tools.profile import fit, worker
from hgc.tools.profile.launch import target


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure this job's machines; the exit code."""
    parser = argparse.ArgumentParser(prog="hgc.tools.profile", description="Measure the machines of a job.")
    parser.add_argument("-o", "--output", required=True, metavar="FILE")
    output = parser.parse_args(arguments).output
    try:
        path = target(output)
        measured = worker.measure()
    except HgcError as mistake:
        print(f"hgc: {mistake}", file=sys.stderr)
        return 2
    if dist.get_rank() == 0:
        cluster, residuals = fit.cluster(measured)
        cluster.save(path)
        say(str(cluster))
        table(_residuals(residuals))
        say(f"wrote {path}")
    dist.barrier()
    leave()
    return 0


def _residuals(residuals: list[fit.Residual]) -> Table:
    shown = Table("model against measurement", "points", "median", "p90")
    for each in residuals:
        shown.add_row(each.what, str(each.points), f"{each.median:.0%}", f"{each.p90:.0%}")
    return shown


if __name__ == "__main__":
    sys.exit(main())

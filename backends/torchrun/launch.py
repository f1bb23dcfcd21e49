"""``launch.sh``: how to start a program on one node or several."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from hgc.plan import Plan

_SCRIPT = """\
#!/usr/bin/env bash
# Start the program on @DEVICES@ processes, on one node or several. Arguments go to program.py: ./launch.sh --steps 20
#
#   one node            ./launch.sh --steps 20
#   N nodes, on each    NNODES=N NODE_RANK=i MASTER_ADDR=first-host ./launch.sh --steps 20
#   another interpreter PYTHON=/path/to/python ./launch.sh
set -euo pipefail

nodes=${NNODES:-1}
total=@DEVICES@
if [[ ! $nodes =~ ^[1-9][0-9]*$ ]]; then
  echo "NNODES is '${nodes}'; expected a positive number" >&2
  exit 2
fi
if (( total % nodes != 0 )); then
  echo "this program needs ${total} processes, which ${nodes} nodes do not share equally; set NNODES to a divisor of ${total}" >&2
  exit 2
fi
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

if (( nodes == 1 )); then
  rendezvous=(--standalone)
else
  rendezvous=(--nnodes "${nodes}" --node-rank "${NODE_RANK:?give the number of this node, from 0}")
  rendezvous+=(--master-addr "${MASTER_ADDR:?give the host name of node 0}" --master-port "${MASTER_PORT:-29500}")
fi
exec "${PYTHON:-python}" -m torch.distributed.run "${rendezvous[@]}" --nproc-per-node $(( total / nodes )) "${here}/program.py" "$@"
"""


def local_command(processes: int, program: Sequence[str]) -> list[str]:
    """What starts ``program`` (a file, or ``-m`` and a module, with arguments) on so many processes of this machine, under this Python."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), *program]


def launch_script(plan: Plan) -> str:
    """A bash script for torchrun; the number of processes is the plan's."""
    return _SCRIPT.replace("@DEVICES@", str(plan.devices))

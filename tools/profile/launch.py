"""Start the measuring processes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from hgc.errors import ClusterError
from hgc.tools.profile.worker import target


def launch(output: str, devices: int | None) -> int:
    """Measure with ``devices`` processes, default one for each GPU or core; the exit code. Raises :class:`ClusterError`."""
    path = target(output)
    gpus = torch.cuda.device_count()
    if gpus and devices and devices > gpus:
        raise ClusterError(f"--devices is {devices}, and this machine has {gpus} GPUs; give at most {gpus}")
    processes = devices or gpus or len(os.sched_getaffinity(0))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if not gpus else {})
    return subprocess.run([*command, "-m", "hgc.tools.profile", "-o", str(path)], env=environment, check=False).returncode

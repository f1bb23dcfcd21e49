"""Start the measuring processes on this machine."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import torch

from hgc.backends import torchrun
from hgc.errors import ClusterError


def launch(output: str, devices: int | None) -> int:
    """Measure with ``devices`` processes, default one for each GPU or core; the exit code. Raises :class:`ClusterError`."""
    path = target(output)
    gpus = torch.cuda.device_count()
    if gpus and devices and devices > gpus:
        raise ClusterError(f"--devices is {devices}, and this machine has {gpus} GPUs; give at most {gpus}")
    processes = devices or gpus or len(os.sched_getaffinity(0))
    command = torchrun.local_command(processes, ["-m", "hgc.tools.profile", "-o", str(path)])
    environment = {"OMP_NUM_THREADS": "1"} | os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if not gpus else {})
    return subprocess.run(command, env=environment, check=False).returncode


def target(path: str) -> Path:
    """Where the cluster file will be, checked before anything is measured."""
    found = Path(path)
    if found.is_dir():
        raise ClusterError(f"{path!r} is a folder; name the file to write, for example {path}/cluster.json")
    if not found.absolute().parent.is_dir():
        raise ClusterError(f"there is no folder {str(found.absolute().parent)!r} for {found.name}; make it first")
    return found

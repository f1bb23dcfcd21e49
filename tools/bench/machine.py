"""What a benchmark says of the machine it ran on."""

from __future__ import annotations

import os
import platform
from typing import Any

import torch


def machine(**more: object) -> dict[str, Any]:
    """For the ``"machine"`` of a result; ``more``: what else matters to a benchmark."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "torch": torch.__version__,
        "python": platform.python_version(),
        **more,
    }

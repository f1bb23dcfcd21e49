"""A data source for ``program.py --data counting:batches`` (with this folder on PYTHONPATH): token sequences that count up and start over.

A data source is a function that takes a request and returns an iterable of batches. A batch is a dict from input name to
the tensor of the *global* batch; every rank takes its own slice. The same request gives the same batches on all ranks.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from hgc import runtime as rt

PERIOD = 32


def batches(request: rt.DataRequest) -> Iterator[dict[str, Tensor]]:
    """``request.sizes`` are what was asked for on the command line; ``first_step`` is past the steps of a resumed checkpoint."""
    rows, length = request.sizes["B"], request.sizes["S"]
    step = request.first_step
    while True:
        generator = torch.Generator().manual_seed(request.seed + step)
        start = torch.randint(0, PERIOD, (rows, 1), generator=generator)
        tokens = (start + torch.arange(length)) % PERIOD
        yield {"input_ids": tokens, "labels": tokens}
        step += 1

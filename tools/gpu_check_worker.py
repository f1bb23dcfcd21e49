"""One variant of ``hgc.tools.gpu_check`` in a process of its own: trains a Llama for a few steps and writes what it took.

``python -m hgc.tools.gpu_check_worker JOB.json RESULT.json``
"""

from __future__ import annotations

import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from hgc import records, runtime
from hgc.backends import torchrun
from hgc.errors import ArtifactError

EAGER, COMPILED, PROGRAM, PROGRAM_COMPILED = "eager", "torch.compile", "hgc", "hgc --compile"
VARIANTS = (EAGER, COMPILED, PROGRAM, PROGRAM_COMPILED)
ROUNDS = 3
"""Steps are timed in so many groups, of which the median counts."""


@dataclass(frozen=True)
class LlamaSize:
    """A Llama with tied embeddings and its batch ``[rows, length]``; the default is Llama 3.2 1B."""

    hidden: int = 2048
    intermediate: int = 8192
    layers: int = 16
    heads: int = 32
    key_heads: int = 8
    vocabulary: int = 128256
    rows: int = 4
    length: int = 2048


TINY = LlamaSize(hidden=64, intermediate=128, layers=2, heads=4, key_heads=2, vocabulary=128, rows=2, length=32)


@dataclass(frozen=True)
class Job:
    """``folder``: of the emitted program."""

    variant: str
    size: LlamaSize
    device: str
    folder: str
    warmup: int
    steps: int


@dataclass(frozen=True)
class Result:
    """``step_s``: of forward, backward and optimizer. ``memory_bytes``: the most that tensors took (CUDA), or that this process grew (CPU).

    ``loss``: of the first step. ``flops``: of a step's products, forward and backward, counted once by the eager variant, else 0.
    """

    variant: str
    step_s: float
    memory_bytes: int
    loss: float
    flops: int
    device: str


def llama(size: LlamaSize) -> nn.Module:
    """In float32, with the same weights in every process that builds it on the same kind of device."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_heads,
        max_position_embeddings=2 * size.length,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.train()


def batch(size: LlamaSize) -> dict[str, Tensor]:
    """Token ids ``[rows, length]`` that are also the labels."""
    ids = torch.randint(0, size.vocabulary, (size.rows, size.length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids.clone()}


def run(job: Job) -> Result:
    """Train; a step computes in bfloat16, keeps parameters in float32 and updates them with AdamW."""
    device = runtime.pick_device(job.device)
    before = 0 if device.type == "cuda" else _status_bytes("VmRSS")
    step, parameters = _program(job, device) if job.variant in (PROGRAM, PROGRAM_COMPILED) else _module(job, device)
    optimizer = torch.optim.AdamW(parameters, lr=1e-4)
    data = batch(job.size)
    flops, loss = 0, 0.0
    for index in range(job.warmup):
        counter = FlopCounterMode(display=False) if job.variant == EAGER and index == 0 else None
        if counter is not None:
            with counter:
                found = step(data)
            flops = int(counter.get_total_flops())
        else:
            found = step(data)
        loss = loss if index else float(found)
        optimizer.step()
        optimizer.zero_grad()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    taken = []
    for _ in range(ROUNDS):
        _settle(device)
        began_s = time.perf_counter()
        for _ in range(job.steps):
            step(data)
            optimizer.step()
            optimizer.zero_grad()
        _settle(device)
        taken.append((time.perf_counter() - began_s) / job.steps)
    memory = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else _status_bytes("VmHWM") - before
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Result(job.variant, statistics.median(taken), memory, loss, flops, name)


Step = Callable[[dict[str, Tensor]], Tensor]


def _module(job: Job, device: torch.device) -> tuple[Step, Iterable[nn.Parameter]]:
    """The model itself, as one would train it by hand."""
    with device:
        model = llama(job.size)
    called = torch.compile(model) if job.variant == COMPILED else model

    def step(data: dict[str, Tensor]) -> Tensor:
        given = {name: tensor.to(device, non_blocking=True) for name, tensor in data.items()}
        with torch.autocast(device.type, torch.bfloat16):
            loss: Tensor = called(**given).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    return step, list(model.parameters())


def _program(job: Job, device: torch.device) -> tuple[Step, Iterable[nn.Parameter]]:
    """The emitted program with the model's weights, which are gone before anything is measured."""
    with device:
        state = llama(job.size).state_dict()
    model, plan = torchrun.load_model(Path(job.folder))
    trainer = runtime.make_trainer(model, plan, state=state, device=job.device, compile_blocks=job.variant == PROGRAM_COMPILED)
    return trainer.step, list(trainer.parameters())


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _status_bytes(name: str) -> int:
    """Of this process as Linux tells it: ``"VmRSS"`` now, ``"VmHWM"`` at most. (``getrusage`` counts what a parent had before.)"""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main(job_path: str, result_path: str) -> None:
    """Read a job, run it, write its result."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    content = records.parse_json(records.read_text(job_path, "job", ArtifactError), "the job", ArtifactError)
    result = run(records.decode(Job, content, "the job", ArtifactError))
    records.write_text(result_path, records.to_text(records.encode(result)), "result", ArtifactError)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The command line of an emitted program: ``torchrun --nproc-per-node N program.py --steps 20``."""

from __future__ import annotations

import argparse
import os
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from hgc.errors import HgcError, PlanError
from hgc.ir.ops.random import manual_seed
from hgc.plan import Precision
from hgc.runtime.batches import BatchError, DataRequest, check_ranges, open_source
from hgc.runtime.checkpoint import check_target
from hgc.runtime.mesh import leave
from hgc.runtime.modules import Model
from hgc.runtime.pipeline import Stages, make_trainer
from hgc.runtime.plan_info import PlanInfo
from hgc.runtime.progress import Progress
from hgc.runtime.tracing import traced
from hgc.runtime.weights import check_export, read_weights

PRECISIONS = {
    "float32": Precision(parameters="float32"),
    "float64": Precision(parameters="float64"),
    "bfloat16": Precision(compute="bfloat16", parameters="float32"),
}
# their updates look at whole parameters (norms, factors, one flat vector), which a share does not show
NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")


TRACED_STEP = 4
"""Which of a run's steps ``--trace`` shows, or the last of fewer: buffers are allocated and kernels chosen by then."""


def main(model: type[Model] | Stages, plan: PlanInfo, argv: Sequence[str] | None = None) -> None:
    """Train as the command line says. After a failure the process ends with code 1, and torchrun ends the others."""
    arguments = parser(plan).parse_args(argv)
    try:
        train(model, plan, arguments)
    except HgcError as error:
        _fail(f"error: {error}")
    except Exception:
        _fail(traceback.format_exc())
    leave()


def _fail(text: str) -> None:
    """Say what is wrong once, and end without waiting for ranks that may hang in a collective."""
    if int(os.environ.get("RANK", 0)) != 0:
        time.sleep(1.0)  # mistakes that all ranks see are told by rank 0, whose end takes the others down
    print(text, file=sys.stderr, flush=True)
    sys.stdout.flush()
    os._exit(1)


def parser(plan: PlanInfo) -> argparse.ArgumentParser:
    """The options of a program; sizes only where the program leaves them open."""
    made = argparse.ArgumentParser(description=f"Train on {plan.world} processes; see docs/design/runtime.md.")
    made.add_argument("--steps", type=_positive, default=10, help="optimizer steps to take in all")
    made.add_argument("--optimizer", default="adamw", help="any elementwise optimizer of torch.optim, by name")
    made.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    made.add_argument("--weight-decay", type=float, default=None, help="the optimizer's own default if not given")
    made.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient, 0 for no limit")
    made.add_argument("--dtype", choices=PRECISIONS, default=None, help=f"bfloat16 keeps float32 parameters; default: {plan.precision}")
    made.add_argument("--batch-size", type=_positive, default=None, help="global batch")
    made.add_argument("--sequence-length", type=_positive, default=None)
    made.add_argument("--size", action="append", default=[], metavar="SYMBOL=N", help=f"any open size: {_symbols(plan)}")
    made.add_argument("--micro-batches", type=_positive, default=plan.micro_batches, help="parts of a rank's batch, one after the other")
    made.add_argument("--data", default=None, metavar="MODULE:FUNCTION", help="source of batches; synthetic ones if not given")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--weights", type=Path, default=None, metavar="FILE", help="start from .safetensors, a folder of them, or torch.save")
    made.add_argument("--save", type=Path, default=None, metavar="DIR", help="write a checkpoint there at the end")
    made.add_argument("--save-every", type=_positive, default=None, metavar="N", help="and after every N steps")
    made.add_argument("--resume", type=Path, default=None, metavar="DIR", help="continue from a checkpoint")
    made.add_argument("--export", type=Path, default=None, metavar="FILE", help="write whole weights to a .safetensors file at the end")
    made.add_argument("--compile", action="store_true", help="run the bodies of blocks through torch.compile")
    made.add_argument("--trace", type=Path, default=None, metavar="FILE", help=f"write a trace of step {TRACED_STEP} of this run")
    made.add_argument("--log-every", type=_positive, default=1, metavar="N")
    made.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    return made


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return number


def _symbols(plan: PlanInfo) -> str:
    return ", ".join(f"{name} ({symbol.meaning})" for name, symbol in plan.symbols.items()) or "this program has none"


def train(model: type[Model] | Stages, plan: PlanInfo, arguments: argparse.Namespace) -> None:
    """Build, resume, train, save."""
    sizes = _sizes(plan, arguments)
    optimizer_class = _optimizer_class(arguments.optimizer)
    if arguments.save is not None:
        check_target(arguments.save)
    if arguments.resume is not None and arguments.weights is not None:
        raise PlanError("--resume and --weights both set the parameters; give one of them")
    if arguments.export is not None:
        check_export(arguments.export)
    if arguments.trace is not None and arguments.compile:
        raise PlanError("--compile hides the collectives inside blocks from --trace; leave one of them out")
    trainer = make_trainer(
        model,
        plan,
        state=None if arguments.weights is None else read_weights(arguments.weights),
        seed=arguments.seed,
        device=arguments.device,
        precision=PRECISIONS.get(arguments.dtype),
        micro_batches=arguments.micro_batches,
        compile_blocks=arguments.compile,
    )
    manual_seed(arguments.seed)
    options = {"lr": arguments.lr} | ({} if arguments.weight_decay is None else {"weight_decay": arguments.weight_decay})
    optimizer = optimizer_class(trainer.parameters(), **options)
    first = trainer.load(arguments.resume, optimizer) if arguments.resume is not None else 0
    request = DataRequest(sizes, arguments.seed, first, dict(plan.mesh), dict(trainer.mesh.coordinates))
    source = open_source(arguments.data, request, plan)
    progress = Progress(trainer.mesh, plan, arguments.log_every)
    shown = None if arguments.trace is None else min(first + TRACED_STEP, arguments.steps)
    for step in range(first + 1, arguments.steps + 1):
        batch = next(source, None)
        if batch is None:
            ended = f"data source {arguments.data!r} ended after {step - 1 - first} batches"
            raise BatchError(f"{ended}; it must yield {arguments.steps - first}, or use fewer --steps")
        with traced(trainer, arguments.trace, optimizer) if step == shown else nullcontext():
            loss = trainer.step(batch)
            norm = trainer.clip_grad_norm(arguments.clip or float("inf"))
            optimizer.step()
        optimizer.zero_grad()
        progress.step(step, loss, norm, batch)
        if arguments.save is not None and (step == arguments.steps or (arguments.save_every and step % arguments.save_every == 0)):
            trainer.save(arguments.save, optimizer, step)
    if arguments.export is not None:
        trainer.export(arguments.export)


def _sizes(plan: PlanInfo, arguments: argparse.Namespace) -> dict[str, int]:
    """Sizes of all symbols: defaults, then what the command line says. Raises ``PlanError`` for sizes that the program fixes."""
    sizes = {name: symbol.default for name, symbol in plan.symbols.items()}
    given = {"batch": ("--batch-size", arguments.batch_size), "sequence": ("--sequence-length", arguments.sequence_length)}
    for meaning, (option, value) in given.items():
        if value is None:
            continue
        name = plan.symbol(meaning)
        if name is None:
            raise PlanError(f"{option} {value}: the program was traced with a fixed {meaning} size; compile it with that size")
        sizes[name] = value
    for text in arguments.size:
        name, _, value = text.partition("=")
        if name not in sizes or not value.isdigit():
            raise PlanError(f"--size {text}: expected SYMBOL=N with one of the open sizes, {_symbols(plan)}")
        sizes[name] = int(value)
    check_ranges(sizes, plan)
    return sizes


def _optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    classes = [cls for cls in vars(torch.optim).values() if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)]
    known = {cls.__name__.lower(): cls for cls in classes if cls.__name__ not in ("Optimizer", *NOT_ELEMENTWISE)}
    if name.lower() not in known:
        raise PlanError(f"--optimizer {name}: expected one of {', '.join(sorted(known))}")
    return known[name.lower()]

"""The commands behind the verbs of ``hgc``: each takes the parsed request and returns the exit code."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
import sys
from pathlib import Path
from typing import Any

from hgc import compiler, records
from hgc.backends import parity, torchrun
from hgc.cluster import Cluster
from hgc.errors import ArtifactError, HgcError, PlanError
from hgc.passes.sharding.plan_text import PlanText
from hgc.passes.sharding.search.pins import parse_pins
from hgc.plan import Plan
from hgc.tools import models
from hgc.tools.console import heading, say, stage, table
from hgc.tools.explain import explain_command as explain_command
from hgc.tools.profile.launch import launch
from hgc.tools.simulate import simulate_command as simulate_command

PROGRAM, PLAN, PICTURES = "program.py", "plan.json", ("graph.svg", "graph.dot")


def compile_command(request: argparse.Namespace) -> int:
    """Compile a model and save the executable."""
    torchrun.check_target(Path(request.output))
    cluster, executable = _compile(request)
    with stage("write"):
        folder = executable.save(request.output)
    _show_plan(executable.plan)
    for sentence in executable.program.report:
        say(f"! {sentence}", "yellow")
    heading("Next")
    say(f"  torchrun --nproc-per-node {_processes(cluster)} {folder / PROGRAM} --steps 20    run it")
    say(f"  hgc verify {folder}    compare it with the model")
    say(f"  hgc show {folder}      plan, blocks, picture")
    say(f"  hgc explain {folder}   why this plan")
    return 0


def plan_command(request: argparse.Namespace) -> int:
    """Decide, and print or write the plan."""
    _, executable = _compile(request)
    _show_plan(executable.plan)
    if request.output:
        executable.plan.save(request.output)
        say(f"\nwrote {request.output}")
    return 0


def verify_command(request: argparse.Namespace) -> int:
    """Run the emitted program against the model; 0 if they agree."""
    _executable(request.folder)
    sys.path.insert(0, str(Path.cwd()))
    model = models.load(request.model, 8, 64)[0] if request.model else None
    with stage("run both"):
        report = parity.verify(request.folder, model=model, ranks="threads" if request.threads else "processes")
    table(report.table())
    say(str(report), "green" if report.ok else "bold red")
    if request.json:
        _write_json(request.json, records.encode(report) | {"ok": report.ok})
    return 0 if report.ok else 1


def show_command(request: argparse.Namespace) -> int:
    """Print plan and program of a folder, and where its picture is."""
    folder = _executable(request.folder)
    _show_plan(Plan.load(folder / PLAN))
    heading("Blocks")
    for line in _outline(folder / PROGRAM):
        say(f"  {line}")
    pictures = [folder / name for name in PICTURES if (folder / name).exists()]
    heading("Files")
    say(f"  {folder / PROGRAM}    the program")
    for picture in pictures[:1]:
        say(f"  {picture}    the picture")
    return 0


def profile_command(request: argparse.Namespace) -> int:
    """Measure on local processes; several machines are measured by ``torchrun ... -m hgc.tools.profile``."""
    return launch(request.output, request.devices)


def bench_command(request: argparse.Namespace) -> int:
    """Run ``hgc.tools.bench.<name>``, whose ``run`` takes the options it names, prints a table and returns what JSON should hold.

    Exits with 1 if that counts something ``wrong``.
    """
    package = importlib.import_module("hgc.tools.bench")
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    benchmarks = [name for name in names if hasattr(importlib.import_module(f"hgc.tools.bench.{name}"), "run")]
    if request.name not in benchmarks:
        raise HgcError(f"there is no benchmark {request.name!r}; {records.suggestion(request.name, benchmarks)}")
    run = importlib.import_module(f"hgc.tools.bench.{request.name}").run
    given = {name: value for name in BENCH_OPTIONS if (value := getattr(request, name)) is not None}
    unknown = [name for name in given if name not in inspect.signature(run).parameters]
    if unknown:
        raise HgcError(f"the benchmark {request.name!r} takes no --{unknown[0]}; leave it out")
    result = run(**given)
    if request.json:
        _write_json(request.json, result)
    return 1 if result.get("wrong") else 0


BENCH_OPTIONS = ("data", "launch", "cases", "seed", "case", "jobs")


def _compile(request: argparse.Namespace) -> tuple[Cluster, compiler.Executable]:
    """What takes no time is checked before the model is loaded."""
    cluster = Cluster.load(request.cluster) if request.cluster else Cluster.local(request.devices)
    plan = _plan(request.plan, cluster)
    fix, forbid = parse_pins("fix", request.fix), parse_pins("forbid", request.forbid)
    with stage("load the model"):
        model, inputs = models.load(request.model, request.batch_size, request.sequence_length)
    with stage("trace, plan, distribute"):
        executable = compiler.compile(model, inputs, cluster=cluster, plan=plan, fix=fix, forbid=forbid, time_limit_s=request.time_limit)
    return cluster, executable


def _plan(text: str, cluster: Cluster) -> Plan | str:
    if text == "auto":
        return text
    if text.endswith(".json") or Path(text).is_file():
        plan = Plan.load(text)
        plan.validate(cluster.devices)
        return plan
    words = PlanText.parse(text)
    if words.places == 1:
        Plan(words.strategy).validate(cluster.devices)
    elif words.devices != cluster.devices:
        raise PlanError(
            f"plan {text!r} needs {words.devices} devices, {words.places} places of {words.strategy.devices}, the cluster has "
            f"{cluster.devices}; change pp or the strategy"
        )
    return text


def _processes(cluster: Cluster) -> str:
    return str(cluster.devices) if len(cluster.nodes) == 1 else f"{cluster.nodes[0].count} --nnodes {len(cluster.nodes)}"


def _executable(name: str) -> Path:
    folder = Path(name)
    if not folder.is_dir():
        raise ArtifactError(f"there is no folder {name!r}; make it with hgc compile ... -o {name}")
    for needed in (PROGRAM, PLAN):
        if not (folder / needed).is_file():
            raise ArtifactError(f"{name!r} is no compiled program: it has no {needed}; make it with hgc compile ... -o {name}")
    return folder


def _show_plan(plan: Plan) -> None:
    heading("Plan")
    for line in str(plan).splitlines():
        say(f"  {line}")


def _outline(path: Path) -> list[str]:
    """The blocks of the emitted program, with the comment behind each that says where it stands."""
    source = records.read_text(path, "program", ArtifactError)
    found = re.findall(r"^class (\w+)\(rt\.Block\):[ \t]*#?[ \t]*(.*)$", source, re.MULTILINE)
    width = max((len(name) for name, _ in found), default=0)
    return [f"{name:<{width}}  {where}".rstrip() for name, where in found]


def _write_json(path: str, content: Any) -> None:
    records.write_text(path, records.to_text(content), "JSON file", HgcError)
    say(f"wrote {path}")

"""``compile()``: from a model to an executable, readable top to bottom."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hgc.automatic import Judge, automatic
from hgc.automatic import search_planner as automatic_search
from hgc.backends import graphviz, parity, simulator, torchrun
from hgc.cluster import Cluster
from hgc.errors import PlanError
from hgc.explanation import Explanation
from hgc.explanation import explain as explain_plan
from hgc.ir.hashing import program_hash, structure_hash
from hgc.ir.program import Program
from hgc.ir.verifier import verify as verify_program
from hgc.passes.base import Pipeline
from hgc.passes.sharding.data_parallel import DataParallel
from hgc.passes.sharding.limits import check_limits
from hgc.passes.sharding.pad_vocabulary import PadVocabulary
from hgc.passes.sharding.plan_text import PlanText
from hgc.passes.sharding.recompute import Recompute
from hgc.passes.sharding.search.pins import Pinned
from hgc.passes.sharding.search.planner import SearchPlanner
from hgc.passes.sharding.sequence_axis import ContextParallel, Ulysses
from hgc.passes.sharding.stages import cut, stage_edges, stage_plan, unsplit_reason
from hgc.passes.sharding.tensor_parallel import TensorParallel
from hgc.passes.sharding.twins import as_twin
from hgc.plan import Plan
from hgc.runtime import PipelineTrainer, Trainer, make_trainer
from hgc.schedule import make as make_schedule
from hgc.simulation import measured, stage_programs
from hgc.strategy import ZERO_STAGES, Strategy
from hgc.tracing import trace

PlanLike = Plan | Strategy | str | Path | Callable[[Program, Cluster], Plan]


def default_pipeline() -> Pipeline:
    """The transforms in order: one mesh axis after the other, major axis first; then what runs twice."""
    return Pipeline((PadVocabulary(), DataParallel(), ContextParallel(), Ulysses(), TensorParallel(), Recompute()))


def compile(
    model: nn.Module,
    example_inputs: Mapping[str, Any],
    *,
    cluster: Cluster | None = None,
    plan: PlanLike | Literal["auto"] = "auto",
    fix: Pinned = (),
    forbid: Pinned = (),
    time_limit_s: float | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    pipeline: Pipeline | None = None,
    name: str | None = None,
) -> Executable:
    """Trace, plan, distribute and check a model.

    Args:
        model: an ordinary module, on the CPU or on meta; left exactly as it was.
        example_inputs: input name -> tensor, a batch of the *global* size; other values are constants of the program.
        cluster: what it will run on; default: the one device of this process, or as many as the plan asks for.
        plan: ``"auto"``, a :class:`Plan`, a :class:`Strategy`, text (``"dp2 tp2"``, ``"pp4 dp2 1f1b micro8"``), a path of a plan file, or
            a function.
        fix, forbid: parts that the plan of ``"auto"`` must have, or must not: ``fix={"tp": 2}``, ``forbid={"zero": [2, 3]}``. Parts are
            ``pp``, ``dp``, ``cp``, ``sp``, ``tp``, ``zero``, ``recompute``, ``sequence_parallel``, ``micro_batches``, ``schedule``.
        time_limit_s: after it ``"auto"`` begins nothing new and takes the best plan that it has; its notes say what was left out.
        loss: ``loss(output, batch) -> scalar`` where the model does not return its loss.
        dynamic: names of dims that vary, ``{"input_ids": {0: "b", 1: "s"}}``; default: batch and sequence.
        pipeline: the transforms; default :func:`default_pipeline`.

    Raises:
        TraceError: the model cannot be captured.
        PlanError, ShardingError: the plan does not fit the cluster or the model.
        VerifyError: a transform produced a program that is not the model.
    """
    traced = trace(model, example_inputs, loss=loss, dynamic=dynamic, name=name)
    options: dict[str, Any] = {"fix": fix, "forbid": forbid, "time_limit_s": time_limit_s}
    cluster, chosen = _choose(plan, traced, cluster, {name: value for name, value in options.items() if value not in ((), {}, None)})
    if not chosen.stages:
        return Executable(distribute(traced, chosen, pipeline), chosen, cluster, model, dict(example_inputs), traced, loss)
    stages = distribute_stages(traced, chosen, pipeline)
    traced.report = list(dict.fromkeys(sentence for stage in stages.stages for sentence in stage.report))
    return Executable(traced, chosen, cluster, model, dict(example_inputs), traced, loss, stages)


def distribute(traced: Program, plan: Plan, pipeline: Pipeline | None = None) -> Program:
    """Apply a plan to a traced program; the verifier checks the result of every transform."""
    torchrun.check_playable(plan)
    check_limits(traced, plan)
    start = traced.copy()
    start.reference = traced
    program = (pipeline or default_pipeline()).apply(start, plan, lambda program, _: verify_program(program))
    if plan.strategy.zero:
        kept = ZERO_STAGES[plan.strategy.zero]
        axes = " and ".join(axis for axis in plan.strategy.mesh if axis != "tp")
        program.report.append(f"zero {plan.strategy.zero}: {kept} over {axes}, when the program runs and not in the graph")
    return program


def distribute_stages(traced: Program, plan: Plan, pipeline: Pipeline | None = None) -> torchrun.Pipeline:
    """Cut a traced program into the plan's stages, apply to each its strategy, and order their work as the plan's schedule says."""
    stages = cut(traced, plan)
    known: dict[tuple[str, Strategy], tuple[Program, Program]] = {}
    lowered = []
    for index, stage in enumerate(stages):
        own = stage_plan(plan, index)
        reason = unsplit_reason(stage, own)
        stage.report += [reason] if reason else []
        key = structure_hash(stage), own.strategy
        if key in known:
            lowered.append(as_twin(stage, *known[key]))
            verify_program(lowered[-1])
        else:
            lowered.append(distribute(stage, own, pipeline))
            known[key] = stage, lowered[-1]
    ranks = [plan.ranks(index) for index in range(len(stages))]
    return torchrun.Pipeline(tuple(lowered), make_schedule(plan.schedule, ranks, plan.micro_batches, stage_edges(stages)))


def simulate(
    traced: Program,
    plan: Plan,
    cluster: Cluster,
    sizes: Mapping[str, float] | None = None,
    options: simulator.Options = simulator.USUAL,
) -> simulator.Simulation:
    """Predict a training step of a traced program under a plan, without compiling it; stages that do the same are lowered once.

    ``sizes``: symbol name -> size of the global batch; default: the example's. Raises as :func:`distribute` and
    :func:`hgc.backends.simulator.simulate`.
    """
    return simulator.simulate(stage_programs(traced, plan, distribute, sizes, options.execution), plan, cluster, sizes, options)


def explain(traced: Program, plan: Plan, cluster: Cluster, **options: Any) -> Explanation:
    """Why ``plan`` for a traced program: what binds, what other plans and settings would cost; see :func:`hgc.explanation.explain`.

    ``options``: of the search that it is compared with.
    """
    judge = Judge(distribute)
    return explain_plan(traced, plan, cluster, automatic_search(distribute, judge, precision=plan.precision, **options), judge)


def _choose(plan: PlanLike | Literal["auto"], traced: Program, cluster: Cluster | None, options: Mapping[str, Any]) -> tuple[Cluster, Plan]:
    identity = program_hash(traced)
    if isinstance(plan, str) and plan == "auto":
        cluster = cluster or Cluster.local(1)
        return cluster, replace(automatic(traced, cluster, search_planner(**options)), program_hash=identity)
    if options:
        raise PlanError(f'{next(iter(options))} is for plan="auto", but plan is {plan!r}; leave one of the two out')
    chosen = _read(plan, traced, cluster)
    cluster = cluster or Cluster.local(chosen.devices)
    chosen.validate(cluster.devices, identity)
    return cluster, replace(chosen, program_hash=identity)


def search_planner(**options: Any) -> SearchPlanner:
    """The search behind ``plan="auto"`` with ``options`` of :class:`SearchPlanner`: ``plan=search_planner(space="galvatron-bmw").run``."""
    return automatic_search(distribute, Judge(distribute), **options)


def _read(plan: PlanLike, traced: Program, cluster: Cluster | None) -> Plan:
    if isinstance(plan, Plan):
        return plan
    if isinstance(plan, Strategy):
        return Plan(plan)
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return Plan.load(plan)
    if isinstance(plan, str):
        return PlanText.parse(plan).plan(traced)
    if callable(plan):
        made = plan(traced, cluster or Cluster.local(1))
        if isinstance(made, Plan):
            return made
        raise PlanError(f"the plan function returned {type(made).__name__}; expected a Plan")
    raise PlanError(f'plan is {type(plan).__name__}; expected "auto", a Plan, a Strategy, text such as "dp2 tp2", a path, or a function')


def real_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What of the model's state has values."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: tensor.detach() for name, tensor in named if not tensor.is_meta}


@dataclass(frozen=True)
class Executable:
    """A compiled model: the distributed program, the plan it follows, and the model it equals.

    ``traced``: the program on one device. Of a pipeline ``program`` is that too, and ``stages`` holds its distributed parts.
    """

    program: Program
    plan: Plan
    cluster: Cluster
    model: nn.Module
    example_inputs: dict[str, Any]
    traced: Program
    loss: Callable[..., torch.Tensor] | None = None
    stages: torchrun.Pipeline | None = None

    @property
    def code(self) -> str:
        """The source of ``program.py``."""
        if self.stages is not None:
            return torchrun.emit_stages(self.stages.stages, self.plan, self.stages.schedule)
        return torchrun.emit(self.program, self.plan)

    def save(self, directory: str | Path, weights: bool = False) -> Path:
        """Write the executable: program, plan, cluster, picture, launch script and what ``hgc verify`` needs; whole or not at all.

        ``weights`` adds the model's own, as ``weights.pt``. An executable that was there is replaced, anything else is refused.
        """
        target = Path(directory)
        with torchrun.staged(target) as staging:
            torchrun.write(staging, self.program, self.plan, self.stages)
            self.cluster.save(staging / torchrun.CLUSTER)
            self.draw(staging / "graph.svg")
            reference = parity.pack(self.model, self.example_inputs, self.loss)
            if reference is not None:
                (staging / parity.FILE).write_bytes(reference)
            if weights:
                torch.save(real_state(self.model), staging / "weights.pt")
        return target

    def load(self, state: Mapping[str, torch.Tensor] | None = None, **options: Any) -> Trainer | PipelineTrainer:
        """The program in this process, as one rank of a running job, for a training loop of your own.

        The result has ``step(batch) -> loss``, ``parameters()``, ``state_dict()`` and more (``hgc.runtime.Trainer``; it takes ``options``).
        ``state``: whole tensors by original name; default: the model's weights, or drawn from ``seed`` where it has none.
        """
        with tempfile.TemporaryDirectory(prefix="hgc-") as folder:
            program, plan = torchrun.load_model(self.save(Path(folder) / "program"))
            weights = state if state is not None else real_state(self.model)
            return make_trainer(program, plan, state=weights, **options)

    def verify(self, **options: Any) -> parity.Report:
        """Compare the program with the model on local processes; ``options`` as for :func:`hgc.backends.parity.verify`."""
        with tempfile.TemporaryDirectory(prefix="hgc-") as folder:
            reference = parity.make(self.model, self.example_inputs, self.loss)
            return parity.verify(self.save(Path(folder) / "program"), model=self.model, reference=reference, **options)

    def simulate(
        self,
        cluster: Cluster | None = None,
        sizes: Mapping[str, float] | None = None,
        options: simulator.Options = simulator.USUAL,
    ) -> simulator.Simulation:
        """Predict a training step on ``cluster`` (default: the one it was compiled for); no device is needed.

        ``sizes``: symbol name -> size of the global batch; default: the example's. The result prints as a table, and has
        ``save_trace(path)`` for Perfetto and ``draw(path)``. Raises ``ClusterError`` for a cluster with fewer devices than the plan.
        """
        programs = self.stages.stages if self.stages else (self.program,)
        schedule = self.stages.schedule if self.stages else None
        stages = measured(programs, self.plan, options.execution)
        return simulator.simulate(stages, self.plan, cluster or self.cluster, sizes, options, schedule)

    def explain(self, cluster: Cluster | None = None) -> Explanation:
        """Why this plan on ``cluster`` (default: the one it was compiled for): words and a table to print, ``draw(path)``."""
        return explain(self.traced, self.plan, cluster or self.cluster)

    def draw(self, path: str | Path | None = None, open_body: str | None = None) -> Any:
        """Picture of the program (``.svg``, ``.png``, ``.pdf`` or ``.dot``); ``open_body`` opens one block."""
        return graphviz.draw(self.program, path, open_body=open_body)

    def __str__(self) -> str:
        lines = [str(self.plan), *(f"! {sentence}" for sentence in self.program.report)]
        return "\n".join(lines)

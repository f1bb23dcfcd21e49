"""Traces of real steps on two processes: the simulator's format, every collective, gradients summed beside backward."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hgc import compiler, traces
from hgc import runtime as rt
from hgc.backends import torchrun
from hgc.backends.parity.threads import run_ranks
from hgc.errors import ArtifactError, PlanError
from hgc.runtime import cli, tracing
from hgc.runtime.tracing_recorder import Span, counts, in_turn, side_by_side
from hgc.tools.bench.overhead_models import Size, global_batch, llama
from tests.distributed.processes import run_processes
from tests.runtime.programs import Model, plan, reference, whole_state

SIZE = Size(hidden=64, layers=3, heads=4, vocabulary=128, rows=4, length=16)
LAYERS = [f"model.layers.{index}" for index in range(3)]
Trace = list[dict[str, Any]]

pytestmark = pytest.mark.distributed


STRATEGIES = ("dp2", "tp2", "dp2 zero3", "pp2 micro2")


def _recomputed() -> list[Counter[str]]:
    """What a step sends, with and without recomputing the layers."""
    found = []
    for again in (False, True):
        trainer = rt.Trainer(Model, plan(tp=2), state=whole_state(reference(torch.float32)), device="cpu")
        if again:
            trainer.model.forward = _forward.__get__(trainer.model)
        with tracing.recorded(trainer) as spans:
            trainer.step({"input_ids": torch.ones(8, 6, dtype=torch.int64), "labels": torch.ones(8, 6, dtype=torch.int64)})
        found.append(counts(spans))
    return found


def _forward(self: Any, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    x = self.embed(input_ids)
    for layer in self.layers:
        x = rt.recompute(layer, x)
    result: torch.Tensor = self.head(x, labels)
    return result


def _train_all(rank: int, folder: str) -> None:
    for strategy in STRATEGIES:
        model, found = torchrun.load_model(Path(folder, strategy, "program"))
        options = {"bucket_bytes": 40_000} if strategy == "dp2" else {}
        trainer = rt.make_trainer(model, found, state=llama(SIZE).state_dict(), device="cpu", **options)
        optimizer = torch.optim.AdamW(trainer.parameters())
        for step in range(2):
            trainer.step(global_batch(SIZE, step))
        with rt.traced(trainer, Path(folder, strategy, "real.json"), optimizer):
            trainer.step(global_batch(SIZE, 2))
            optimizer.step()
        trainer.step(global_batch(SIZE, 3))  # nothing is left of the hooks that another step would trip over
    Path(folder, "recomputed.json").write_text(json.dumps(_recomputed()))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For each strategy a folder with ``real.json`` and ``simulated.json``."""
    folder = tmp_path_factory.mktemp("traces")
    for strategy in STRATEGIES:
        executable = compiler.compile(llama(SIZE), global_batch(SIZE, 0), plan=strategy)
        (folder / strategy).mkdir()
        executable.save(folder / strategy / "program")
        executable.simulate().save_trace(folder / strategy / "simulated.json")
    run_processes(2, _train_all, str(folder))
    return folder


def traced_and_simulated(folder: Path) -> tuple[Trace, Trace]:
    """The events of a real step and of its simulation."""
    return events_of(folder / "real.json"), events_of(folder / "simulated.json")


def events_of(path: Path) -> Trace:
    found = json.loads(path.read_text())
    assert found["displayTimeUnit"] == "ms"
    events: Trace = found["traceEvents"]
    return events


def shown(events: Trace, process: int = 0) -> Trace:
    return [event for event in events if event["ph"] == "X" and event["pid"] == process]


def sent(events: Trace, process: int = 0) -> Counter[str]:
    return Counter(event["name"] for event in shown(events, process) if event["cat"] not in ("actions", "compute", "optimizer"))


def check_form(events: Trace) -> None:
    """Every event is on a named thread of a named process; threads do not overlap; computation lies inside actions."""
    names = {(event["pid"], event.get("tid")): event["args"] for event in events if event["ph"] == "M"}
    by_thread: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in events:
        if event["ph"] == "X":
            assert event.keys() == {"ph", "pid", "tid", "ts", "dur", "cat", "name"}
            assert event["dur"] > 0 <= event["ts"]
            assert (event["pid"], event["tid"]) in names
            by_thread.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_thread.values():
        ordered = sorted(spans)
        assert all(end <= begin + 0.002 for (_, end), (begin, _) in itertools.pairwise(ordered))  # rounded to 0.001
    for process in {event["pid"] for event in events}:
        actions = [event for event in shown(events, process) if event["cat"] == "actions"]
        for event in shown(events, process):
            if event["cat"] == "compute":
                assert any(_inside(event, action) for action in actions), event


def _inside(event: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(other["ts"] - 0.002 <= event["ts"] and event["ts"] + event["dur"] <= other["ts"] + other["dur"] + 0.002)


def order(events: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names in order of time, neighbours of one name once."""
    names = [event["name"] for event in sorted(events, key=lambda event: event["ts"])]
    return [name for index, name in enumerate(names) if index == 0 or name != names[index - 1]]


def test_gradients_are_summed_beside_backward(folders: Path) -> None:
    real, _ = traced_and_simulated(folders / "dp2")
    check_form(real)
    for process in (0, 1):
        found = shown(real, process)
        (backward,) = (event for event in found if event["name"] == "0B0")
        buckets = [event for event in found if event["name"].startswith("bucket")]
        assert len(buckets) > 3
        computing = [event for event in found if event["cat"] == "compute" and _inside(event, backward)]
        beside = [b for b in buckets if any(b["ts"] < c["ts"] + c["dur"] and c["ts"] < b["ts"] + b["dur"] for c in computing)]
        assert len(beside) >= 2
        assert min(b["ts"] for b in buckets) < max(c["ts"] for c in computing)
        assert order(event for event in found if event["cat"] in ("compute", "optimizer")) == [
            *("Embeddings", *LAYERS, "Head"),
            *(*reversed(LAYERS), "Embeddings", "adamw"),
        ]


@pytest.mark.parametrize("strategy", ["tp2", "dp2 zero3"])
def test_the_same_is_sent_as_simulated(strategy: str, folders: Path) -> None:
    """Names, rows and numbers of all collectives: the trace misses none, and calls none by another name."""
    real, simulated = traced_and_simulated(folders / strategy)
    check_form(real)
    expected = sent(simulated)
    assert len(expected) > 5
    assert sent(real) == expected == sent(real, process=1)

    def rows(events: Trace) -> set[str]:
        return {event["cat"].partition(" (")[0] for event in events if event["ph"] == "X"}

    assert rows(real) == rows(simulated)


def test_stages_show_their_actions_and_messages(folders: Path) -> None:
    real, simulated = traced_and_simulated(folders / "pp2 micro2")
    check_form(real)
    for process in (0, 1):
        mine, theirs = ([event for event in shown(events, process) if event["cat"] == "actions"] for events in (real, simulated))
        assert order(mine) == order(theirs)
        moved = {name for name in sent(real, process) if "SEND" in name}
        assert moved == {name for name in sent(simulated, process) if "SEND" in name} != set()


def test_two_traces_in_one_file(folders: Path, tmp_path: Path) -> None:
    given, target = folders / "dp2", tmp_path / "both.json"
    real, simulated = traced_and_simulated(given)
    traces.lay_over(given / "simulated.json", given / "real.json", target)
    both = events_of(target)
    names = [event["args"]["name"] for event in sorted(both, key=lambda event: event["pid"]) if event["name"] == "process_name"]
    assert names == ["simulated: ranks 0-1", "real: rank 0", "real: rank 1"]
    assert len(shown(both, 0)) == len(shown(simulated))
    assert shown(both, 2) == [event | {"pid": 2} for event in shown(real, 1)]
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"plan.json' holds no trace; give a file that save_trace or a program's --trace has written"):
        traces.lay_over(tmp_path / "plan.json", given / "real.json", target)


def test_the_command_line_traces_a_step(tmp_path: Path) -> None:
    compiler.compile(llama(SIZE), global_batch(SIZE, 0), plan="dp1").save(tmp_path / "program")
    command = [sys.executable, str(tmp_path / "program" / "program.py"), "--steps", "2", "--device", "cpu"]
    done = subprocess.run([*command, "--trace", "t.json"], cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    real = events_of(tmp_path / "t.json")
    check_form(real)
    assert {"0F0", "0B0", "Head", "adamw", *LAYERS} <= {event["name"] for event in shown(real)}
    with pytest.raises(PlanError, match="--compile hides the collectives inside blocks from --trace; leave one of them out"):
        cli.train(Model, plan(), cli.parser(plan()).parse_args(["--trace", "t.json", "--compile"]))


def test_recomputed_blocks_send_again_under_their_name(folders: Path) -> None:
    plain, again = json.loads((folders / "recomputed.json").read_text())
    layers = [f"all_reduce layers.{index}" for index in range(3)]
    assert all(again[name] == plain[name] + 1 for name in layers)  # of two in forward the one before the last needed value
    assert {name: n for name, n in again.items() if name not in layers} == {name: n for name, n in plain.items() if name not in layers}


def test_compiled_blocks_are_refused() -> None:
    def refused(rank: int) -> None:
        trainer = rt.Trainer(Model, plan(), state=whole_state(reference()), device="cpu", compile_blocks=True)
        with pytest.raises(PlanError, match="compile_blocks hides the collectives inside blocks"), tracing.recorded(trainer):
            pass

    run_ranks(1, refused)


def test_on_a_serial_stream_each_begins_when_the_one_before_is_through() -> None:
    asked = [(Span("dp", 0.0, 4.0, "a"), True), (Span("dp", 1.0, 6.0, "b"), True), (Span("tp", 1.0, 2.0, "c"), True)]
    assert [(span.begin_s, span.end_s) for span in in_turn(asked)] == [(0.0, 4.0), (4.0, 6.0), (1.0, 2.0)]


def test_what_runs_side_by_side_gets_rows_of_its_own() -> None:
    spans = [Span("dp", 0.0, 4.0, "a"), Span("dp", 1.0, 2.0, "b"), Span("dp", 2.0, 3.0, "c"), Span("dp", 4.0, 5.0, "d")]
    assert {span.name: span.row for span in side_by_side(spans)} == {"a": "dp", "b": "dp (2)", "c": "dp (2)", "d": "dp"}

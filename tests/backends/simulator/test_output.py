"""The trace, the picture, the command, and that large jobs are simulated quickly."""

from __future__ import annotations

import json
import re
import time
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

import hgc
from hgc.backends.simulator import Meeting, Message, Step, Timeline, Work, picture, play, trace
from hgc.errors import ArtifactError, ClusterError
from hgc.schedule import chain, make
from hgc.tools.cli import main
from hgc.tools.simulate import find_cluster
from tests import small_models
from tests.backends.simulator.test_stage_steps import block, stage
from tests.schedule.test_schedule import line


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    found = stage(zero=2, tp=0.25)
    edges = chain(3)
    messages = {(edge, way): Message(0.25) for edge in edges for way in "FB"}
    end = tuple(Meeting((number,), (*found.synchronised(), Step(0.5, "optimizer", "adamw"))) for number in range(3))
    work = Work(lambda a: found.steps(a.kind, first=a.micro_batch == 0, last=a.micro_batch == 3), messages, end)
    return play(make("1f1b", line(3, width=2), 4), work)


def test_a_trace_has_a_process_for_ranks_and_a_thread_for_each_stream(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    trace.save(timeline, path)
    events = json.loads(path.read_text())["traceEvents"]
    named = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert named == {0: "ranks 0-1", 1: "ranks 2-3", 2: "ranks 4-5"}
    threads = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [name for (process, _), name in sorted(threads.items()) if process == 1] == [
        "actions",
        "compute",
        "dp",
        "pp 1 to 0",
        "pp 1 to 2",
        "tp",
    ]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["name"] for event in spans if threads[event["pid"], event["tid"]] == "actions"} >= {"0F0", "1B3"}
    assert {"layers.0", "gather layers.0", "scatter layers.3", "all_reduce layers.1", "adamw", "0SEND_F0"} <= {e["name"] for e in spans}
    for key in threads:
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if (e["pid"], e["tid"]) == key)
        assert times
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(times))
    for process, parts in enumerate(timeline.parts):
        busy = sum(e["dur"] for e in spans if threads[e["pid"], e["tid"]] == "compute" and e["pid"] == process)
        assert busy == pytest.approx((parts.compute_s + parts.optimizer_s) * 1e6)
    assert max(e["ts"] + e["dur"] for e in spans) == pytest.approx(timeline.step_s * 1e6)


def test_a_picture_has_a_box_for_each_action(timeline: Timeline, tmp_path: Path) -> None:
    path = tmp_path / "timeline.svg"
    picture.save(timeline, path)
    root = ElementTree.fromstring(path.read_text())
    titles = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}title")]
    assert len([title for title in titles if re.fullmatch(r"\d[FB]\d", title)]) == 3 * 4 * 2
    words = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"forward", "backward", "optimizer", "messages", "dp", "tp", "ranks 0-1", "ranks 4-5"} <= words
    rights = [float(e.get("x", 0)) + float(e.get("width", 0)) for e in root.iter("{http://www.w3.org/2000/svg}rect")]
    assert max(rights[1:]) <= picture.LEFT + picture.WIDTH + 0.5
    with pytest.raises(ArtifactError, match="would not be SVG"):
        picture.save(timeline, tmp_path / "timeline.png")


def test_a_large_picture_stays_small() -> None:
    """Boxes too near to tell apart are drawn as one."""
    found = stage(tp=0.25, blocks=tuple((f"layers.{number}", block("Layer", 0.25)) for number in range(64)), unit_of=(0,) * 64)
    work = Work(lambda a: found.steps(a.kind, first=False, last=False))
    timeline = play(make("1f1b", line(2), 64), work)
    assert sum(map(len, timeline.events)) > 30_000
    assert len(picture.draw(timeline)) < 500_000


def test_1024_devices_take_seconds() -> None:
    """96 layers on 16 stages of 64 ranks, 64 micro-batches."""
    layers = tuple((f"layers.{number}", block("Layer", 0.01)) for number in range(6))
    found = stage(blocks=layers, unit_of=(0,) * 6, buckets=())
    work = Work(lambda a: found.steps(a.kind, first=False, last=False), {(edge, way): Message(0.1) for edge in chain(16) for way in "FB"})
    started = time.process_time()
    ranks = line(16, width=64)
    timeline = play(make("1f1b", ranks, 64), work)
    assert time.process_time() - started < 5
    assert sum(map(len, timeline.ranks)) == 1024
    assert timeline.step_s == pytest.approx(79 * 6 * 3.02 + 30 * 0.1, rel=0.05)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("compiled") / "out"
    model, batch = small_models.works()
    hgc.compile(model, batch, plan="dp2").save(path)
    return path


def test_the_command_simulates_a_folder(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = tmp_path / "trace.json", tmp_path / "timeline.svg"
    options = ["--trace", str(outputs[0]), "--picture", str(outputs[1]), "--batch-size", "4096"]
    assert main(["simulate", str(folder), "--cluster", "a100-80:2", *options]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^step +[\d.]+ .?s +on 2 devices$", said, re.MULTILINE)
    assert re.search(r"^memory +[\d.]+ .iB +on the fullest device, ranks 0-1$", said, re.MULTILINE)
    assert all(path.stat().st_size > 500 for path in outputs)
    cluster = tmp_path / "cluster.json"
    hgc.Cluster.preset("a100-80").save(cluster)
    assert main(["simulate", str(folder), "--cluster", str(cluster)]) == 0


def test_the_command_and_the_executable_agree(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, batch = small_models.works()
    found = hgc.compile(model, batch, plan="dp2").simulate(hgc.Cluster.preset("a100-80"))
    assert main(["simulate", str(folder), "--cluster", "a100-80"]) == 0
    assert str(found) in capsys.readouterr().out


def test_what_the_command_refuses(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["simulate", *words]) == 2
        return capsys.readouterr().err

    assert "no device is called 'a100-8'" in refused(str(folder), "--cluster", "a100-8")
    assert "is no folder" in refused(str(tmp_path / "nothing"), "--cluster", "a100-80")
    assert "the program has no size that means sequence" in refused(str(folder), "--cluster", "a100-80", "--sequence-length", "8")
    assert "the model is not the one" in refused(str(folder), "--cluster", "a100-80", "--model", "tests.small_models:wider")
    assert "the optimizer 'adm' is not known" in refused(str(folder), "--cluster", "a100-80", "--optimizer", "adm")
    with pytest.raises(ClusterError, match="give a JSON file, or a preset and its nodes"):
        find_cluster("a100-80:eight")

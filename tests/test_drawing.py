"""Pictures: short for deep models, explicit about placements and communication, safe against any name, useful without ``dot``."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc.backends.graphviz import draw, folding, naming
from hgc.errors import ArtifactError, HgcError
from tests.layered import layered_program

needs_dot = pytest.mark.skipif(shutil.which("dot") is None, reason="the dot binary is not installed")


def _labels(source: str) -> list[str]:
    """The visible words of each box."""
    found = re.findall(r"label=<(<TABLE.*?</TABLE>)>[ \]]", source)
    return [" ".join(" ".join(ET.fromstring(label).itertext()).split()) for label in found]


def _expand(items: tuple[folding.Item, ...], keys: list[str]) -> list[str]:
    return [key for item in items for key in ([keys[item]] if isinstance(item, int) else _expand(item.unit, keys) * item.count)]


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_folding_loses_nothing(keys: list[str]) -> None:
    items = folding.fold(keys, lambda before, after: True)
    assert _expand(items, keys) == keys
    covered = sorted(position for item in items for _, positions in folding.leaves(item) for position in positions)
    assert covered == list(range(len(keys)))
    assert all(keys[first] == keys[position] for item in items for first, places in folding.leaves(item) for position in places)


def test_folding_finds_runs_of_runs() -> None:
    keys = ["e", *(["l"] * 5 + ["g"]) * 8, "h"]
    assert folding.fold(keys, lambda before, after: True) == (0, folding.Run((folding.Run((1,), 5), 6), 8), 49)


def test_equal_towers_stay_apart() -> None:
    """Two chains of three equal blocks that do not feed one another."""
    items = folding.fold(["b"] * 6, lambda before, after: before // 3 == after // 3)
    assert items == (folding.Run((0,), 3), folding.Run((3,), 3))


def test_eighty_layers_are_one_box() -> None:
    source = draw(layered_program(["Layer"] * 80)).source
    words = _labels(source)
    assert len(words) == 7, "two inputs, embedding, layers, loss block, loss, legend"
    (layers,) = (text for text in words if text.startswith("Layer "))
    assert "× 80" in layers
    assert "model.layers.0-79" in layers
    assert "32.8k parameters each" in layers


def test_boxes_show_placements_and_communication() -> None:
    words = _labels(draw(layered_program(["Layer"] * 4)).source)
    (layers,) = (text for text in words if text.startswith("Layer "))
    assert "dp S(0) tp S(1) all_gather tp reduce_scatter tp" in layers
    (legend,) = (text for text in words if "Legend" in text)
    assert "2 data parallel (dp) × 2 tensor parallel (tp)" in legend
    assert "B = batch, T = sequence" in legend
    assert "P: ranks hold summands" in legend
    assert "R: same" not in legend, "the legend explains what the picture shows and nothing else"


def test_opened_block_shows_its_operators() -> None:
    source = draw(layered_program(["Layer"] * 80), open_body="Layer").source
    words = _labels(source)
    assert any(text.startswith("pow, mean, rsqrt, mul, mul") for text in words), "the small operators of a norm are one box"
    assert any("up linear weight [256, 64]" in text for text in words)
    assert source.count("shape=component") == 3, "copy_in, all_gather and reduce_scatter stand out"
    assert any("reduce_scatter tp, dim 1" in text for text in words)
    assert not any("sym_size" in text for text in words)
    assert len(words) == 16


def test_patterns_are_drawn_as_runs_of_runs() -> None:
    source = draw(layered_program((["Local"] * 5 + ["Global"]) * 8)).source
    words = _labels(source)
    assert any("Local × 5 model.layers.0-4,6-10,...,42-46" in text for text in words)
    assert any("Global model.layers.5,11,...,47" in text for text in words)
    assert "× 8" in source


def test_pictures_are_reproducible() -> None:
    assert draw(layered_program(["Layer"] * 3)).source == draw(layered_program(["Layer"] * 3)).source


@settings(max_examples=25, deadline=None)
@given(name=st.text(min_size=1, max_size=30))
def test_no_name_breaks_or_injects(name: str) -> None:
    program = layered_program(["Layer"] * 2)
    program.name = name + '<B>"&\\N\n]'
    source = draw(program).source
    (title,) = re.findall(r"label=<(<FONT[^\n]*</FONT>)> tooltip", source)
    visible = "".join(c for c in name if c.isprintable())
    assert "".join(ET.fromstring(title).itertext()).startswith(visible + '<B>"&\\N]')
    assert html.unescape(title).count("\n") == 0


@needs_dot
@pytest.mark.parametrize("name", ['a"b', "<TABLE>", "a -> b; c", "\\l{x|y}", "名前", "x\x00y"])
def test_dot_accepts_any_name(name: str, tmp_path: Path) -> None:
    program = layered_program(["Layer"] * 2)
    program.name = name
    draw(program, tmp_path / "graph.svg", open_body="Layer")
    assert ET.parse(tmp_path / "graph.svg").getroot().tag.endswith("svg")


@needs_dot
@pytest.mark.parametrize("ending", ["svg", "png", "pdf", "dot"])
def test_formats(ending: str, tmp_path: Path) -> None:
    draw(layered_program(["Layer"] * 80), tmp_path / f"graph.{ending}")
    content = (tmp_path / f"graph.{ending}").read_bytes()
    starts = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF", "dot": b"digraph"}
    assert content.startswith(starts[ending])
    assert [path.name for path in tmp_path.iterdir()] == [f"graph.{ending}"]


def test_without_dot_the_source_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    draw(layered_program(["Layer"] * 4), tmp_path / "graph.svg")
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "for the picture run, beside it: dot -Tsvg graph.dot -o graph.svg" in said
    assert (tmp_path / "graph.dot").read_text().startswith("digraph")
    assert not (tmp_path / "graph.svg").exists()


def test_slow_dot_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def too_slow(*arguments: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("dot", 60)

    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(subprocess, "run", too_slow)
    draw(layered_program(["Layer"] * 4), tmp_path / "graph.png")
    assert "'dot' did not finish in 60 s" in capsys.readouterr().out
    assert (tmp_path / "graph.dot").exists()


def test_mistakes(tmp_path: Path) -> None:
    program = layered_program(["LlamaDecoderLayer"] * 2)
    with pytest.raises(HgcError, match=r"no block 'LlamaDecoderLayr' to open; did you mean 'LlamaDecoderLayer'\?"):
        draw(program, open_body="LlamaDecoderLayr")
    with pytest.raises(ArtifactError, match=r"ends in '.jpeg'; expected one of .svg, .png"):
        draw(program, tmp_path / "graph.jpeg")
    with pytest.raises(ArtifactError, match="create it first"):
        draw(program, tmp_path / "missing" / "graph.svg")


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["a.0.b", "a.1.b", "a.2.b"], "a.0-2.b"),
        (["a.0", "a.2"], "a.0,2"),
        (["a.x", "a.y"], "a.x and 1 more"),
        (["a", "a"], "a"),
        (["a.3"], "a.3"),
    ],
)
def test_path_ranges(paths: list[str], expected: str) -> None:
    assert naming.path_range(paths) == expected

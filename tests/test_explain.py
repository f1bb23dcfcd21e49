"""Explanations: numbers against the simulations that they claim to come from, plans written by hand, the command, the picture."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from hgc import compiler
from hgc.cluster import Cluster
from hgc.errors import ArtifactError
from hgc.explanation import Explanation
from hgc.explanation.explain import PARTS, values_of
from hgc.explanation.words import rows, sentences
from hgc.passes.sharding.search.judged import in_words
from hgc.plan import Plan, Stage
from hgc.strategy import Strategy
from hgc.tools.cli import main
from tests.distributed.pipelines import subject

HAND = Plan(Strategy(dp=2, zero=3, recompute="full"))


@cache
def _explained() -> Explanation:
    """A plan that nobody would search for."""
    return compiler.explain(subject("llama").program, HAND, Cluster.local(2))


def test_the_plan_itself_is_simulated() -> None:
    found, wanted = _explained(), compiler.simulate(subject("llama").program, HAND, Cluster.local(2))
    assert found.step_s == pytest.approx(wanted.step_s)
    assert found.simulation.peak_bytes == pytest.approx(wanted.peak_bytes)
    assert found.fullness == pytest.approx(wanted.peak_bytes / Cluster.local(2).nodes[0].device.memory_bytes)


def test_alternatives_differ_in_their_part_and_cost_what_they_are_simulated_to() -> None:
    found = _explained()
    assert tuple(each.part for each in found.alternatives) == PARTS
    for each in found.alternatives:
        assert each.values == values_of(HAND, each.part)
        if each.found is None:
            assert each.why_not
            continue
        assert not set(values_of(each.found.plan, each.part)) & set(each.values)
        assert each.found.step_s == pytest.approx(compiler.simulate(subject("llama").program, each.found.plan, Cluster.local(2)).step_s)
    by_part = {each.part: each.found for each in found.alternatives}
    assert by_part["recompute"] is not None
    assert by_part["recompute"].step_s < found.step_s


def test_words_are_true_of_a_plan_by_hand() -> None:
    found = _explained()
    assert found.searched is not None
    said = " ".join(sentences(found))
    assert f"the search finds a faster plan: {in_words(found.searched.best.plan)} takes" in said
    assert f"{found.searched.outcome.gap:.1%} more" in said
    table = list(rows(found))
    assert table[0][:2] == ("this plan", in_words(HAND))
    assert all(row[0] in str(found) for row in table)


def test_words_about_the_fastest_plan_and_one_that_does_not_fit() -> None:
    found = _explained()
    assert found.searched is not None
    best = found.searched.best
    simulation = replace(found.simulation, step_s=best.step_s)
    assert "this one is the fastest" in next(sentences(replace(found, plan=best.plan, simulation=simulation)))
    assert "this plan does not fit" in next(sentences(replace(found, fullness=1.2)))
    assert "nothing is proven" in " ".join(sentences(replace(found, searched=None, why_not="none")))


def test_budgets_and_batches() -> None:
    """Plans keep to their budget; more memory never makes the best slower; larger batches are found where the model allows them."""
    found = _explained()
    assert found.budgets[0].memory_bytes == 2 * Cluster.local(2).nodes[0].device.memory_bytes
    tight = [each for each in found.budgets[1:] if each.found is not None]
    assert tight
    assert all(each.found.memory_bytes <= each.memory_bytes for each in tight)  # type: ignore[union-attr]
    assert [each.batch for each in found.batches] == [2, 8, 16]
    assert [each.found.step_s for each in found.batches if each.found] == sorted(each.found.step_s for each in found.batches if each.found)


def test_twice_as_fast_is_faster_and_less_than_twice() -> None:
    found = _explained()
    assert all(found.step_s / 2 <= each.step_s < found.step_s for each in found.faster)


def test_front_and_picture(tmp_path: Path) -> None:
    """The front is what no plan that was seen beats; every plan is a circle of the picture, and one more is the ring."""
    found = _explained()
    front = found.front()
    for each in front:
        assert not any(other.step_s < each.step_s and other.memory_bytes <= each.memory_bytes for other in found.seen)
    found.draw(tmp_path / "front.svg")
    shapes = ET.fromstring((tmp_path / "front.svg").read_text()).iter("{http://www.w3.org/2000/svg}circle")
    assert len(list(shapes)) == len(found.seen) + 1
    with pytest.raises(ArtifactError, match=r"ends with \.svg"):
        found.draw(tmp_path / "front.png")


def test_values_of_stages() -> None:
    stages = (Stage(1, 0, Strategy(dp=2)), Stage(1, 0, Strategy(tp=2)), Stage(1, 2, Strategy(dp=2)))
    plan = Plan(stages=stages, micro_batches=4)
    assert [values_of(plan, part) for part in ("pp", "dp", "tp", "micro_batches")] == [(2,), (2, 1), (1, 2), (4,)]


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, numbers = tmp_path / "out", tmp_path / "numbers.json"
    assert main(["compile", "tests.small_models:works", "--devices", "2", "--plan", "dp2 zero3", "-o", str(folder)]) == 0
    assert f"hgc explain {folder}" in capsys.readouterr().out
    assert main(["explain", str(folder), "--json", str(numbers)]) == 0
    said = capsys.readouterr().out
    assert "not zero 3" in said
    assert "proven by the search's own costs" in said
    assert (folder / "explain.svg").exists()
    content = json.loads(numbers.read_text())
    assert content["plan"] == "dp2 zero3"
    assert {each["part"] for each in content["alternatives"]} == set(PARTS)
    (folder / "cluster.json").unlink()
    assert main(["explain", str(folder)]) == 2
    assert "does not say for which cluster it was compiled; give --cluster" in capsys.readouterr().err


def test_pins_and_time_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    asked = ["plan", "tests.small_models:works", "--devices", "2", "-o", str(plan)]
    assert main([*asked, "--fix", "dp=2", "--forbid", "zero=0,1", "--time-limit", "60"]) == 0
    assert all(strategy.dp == 2 and strategy.zero >= 2 for strategy in Plan.load(plan).strategies)
    for words, said in (
        (["--fix", "dp=3"], "dp is fixed to 3, which does not divide 2 devices"),
        (["--fix", "dp"], "'dp' pins nothing"),
        (["--plan", "dp2", "--fix", "dp=2"], 'fix is for plan="auto"'),
        (["--time-limit", "0"], "not a number of seconds above 0"),
    ):
        capsys.readouterr()
        assert main([*asked, *words]) == 2
        assert said in capsys.readouterr().err

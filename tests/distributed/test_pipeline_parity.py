"""Emitted pipelines against the unmodified model: every schedule, like and unlike stages, skip edges and tied embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import hgc
from hgc.plan import SCHEDULES as SCHEDULE_NAMES
from tests.distributed.pipelines import MakePlan, check_parity, even, placed, subject, unlike
from tests.families import FAMILIES

FAMILY = ("gpt2", "llama", "t5")

SCHEDULES: dict[str, MakePlan] = {
    "pp2 gpipe": even(2, schedule="gpipe", micro_batches=4),
    "pp4 1f1b": even(4, micro_batches=4),
    "pp2 interleaved": even(2, schedule="interleaved", virtual=2, micro_batches=4),
    "pp4 zb-h1": even(4, schedule="zb-h1", micro_batches=4),
    "pp2 x tp2 zb-h1": even(2, "tp2", "zb-h1"),
}
UNLIKE: dict[str, MakePlan] = {
    "pp2 x dp2": even(2, "dp2"),
    "tp2 -> dp2": unlike("tp2", "dp2"),
    "4 + 2 + 2": unlike("dp2 tp2", "tp2", "dp2"),
}
MORE: dict[str, MakePlan] = {
    "pp2 x tp2": even(2, "tp2"),
    "pp2 x dp2 interleaved": even(2, "dp2", "interleaved", virtual=2),
    "dp2 -> tp2": unlike("dp2", "tp2"),
    "1 + 2 + 1": unlike("dp1", "tp2", "dp1"),
    "zero3": even(2, "dp2 zero3"),
    "zero2": even(2, "dp2 zero2"),
    "zero1 zb-h1": even(2, "dp2 zero1", "zb-h1"),
    "recompute": even(2, "dp2 recompute"),
    "cp2 -> dp2": unlike("cp2", "dp2"),
    "sp2 x tp2 -> cp2": unlike("sp2 tp2", "cp2"),
}


def quick(family: str, plan: str) -> bool:
    return family != "t5" or plan in ("pp4 1f1b", "pp2 interleaved", "4 + 2 + 2")


CASES = [(family, plan) for family in FAMILY for plan in (*SCHEDULES, *UNLIKE)]


OVERLAPPING: dict[str, MakePlan] = {
    "then all ranks": placed((2, 0, "dp2"), (2, 2, "dp2"), (1, 0, "dp2 tp2")),
    "one rank in two stages": placed((2, 0, "dp2"), (2, 1, "tp2"), (1, 0, "dp1")),
    "unlike on the same ranks": placed((2, 0, "dp2"), (1, 2, "tp2"), (2, 0, "tp2"), schedule="zb-h1"),
}


@pytest.mark.parametrize("plan", OVERLAPPING)
def test_overlapping_ranks(plan: str, tmp_path: Path) -> None:
    """What waves need: who talks to whom is free."""
    check_parity(subject("gpt2"), OVERLAPPING[plan], tmp_path / "out")


@pytest.mark.parametrize(("family", "plan"), [pytest.param(*c, marks=() if quick(*c) else pytest.mark.slow) for c in CASES])
def test_stages_on_threads(family: str, plan: str, tmp_path: Path) -> None:
    """1e-5 in float32, 1e-10 in float64."""
    check_parity(subject(family), (SCHEDULES | UNLIKE)[plan], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("plan", MORE)
@pytest.mark.parametrize("family", FAMILY)
def test_more_stages_on_threads(family: str, plan: str, tmp_path: Path) -> None:
    check_parity(subject(family), MORE[plan], tmp_path / "out")


@pytest.mark.parametrize("family", ["gpt2"])
def test_three_ranks_and_one(family: str, tmp_path: Path) -> None:
    check_parity(subject(family, rows=6), unlike("dp3", "dp1"), tmp_path / "out")


def test_weights_in_front_of_all_inputs(tmp_path: Path) -> None:
    """The decoder's embedding and first attention come before the stage reads the encoder's output; backward is split all the same."""
    check_parity(subject("t5"), placed((4, 0, "dp1"), (6, 1, "dp1"), schedule="zb-h1"), tmp_path / "out")


def test_there_and_back(tmp_path: Path) -> None:
    """ZB-V: embedding and head are on one rank, and hold the tied table twice."""
    check_parity(subject("gpt2"), even(2, schedule="zbv", virtual=2, micro_batches=4), tmp_path / "out")


@pytest.mark.distributed
@pytest.mark.parametrize(("family", "plan"), [("gpt2", "one rank in two stages"), ("llama", "tp2 -> dp2")])
def test_processes(family: str, plan: str) -> None:
    model, batch = FAMILIES[family]()
    executable = hgc.compile(model, batch, plan=lambda program, _: (OVERLAPPING | UNLIKE)[plan](program))
    assert executable.verify(steps=3).ok


ON_PROCESSES: dict[str, MakePlan] = {
    "gpipe": even(3, schedule="gpipe", micro_batches=4),
    "1f1b": unlike("tp2", "dp1", "dp1", micro_batches=4),
    "interleaved": even(2, "dp2", "interleaved", virtual=2),
    "zb-h1": even(4, schedule="zb-h1", micro_batches=4),
    "zbv": even(2, "tp2", "zbv", micro_batches=4, virtual=2),
}
"""Every schedule once, on 3 or 4 ranks."""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_schedule_on_processes(schedule: str) -> None:
    """gloo carries messages in another order than threads do."""
    model, batch = FAMILIES["gpt2"]()
    executable = hgc.compile(model, batch, plan=lambda program, _: ON_PROCESSES[schedule](program))
    assert executable.plan.schedule == schedule
    assert executable.verify(dtype=torch.float64, steps=3).ok


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("plan", [*SCHEDULES, *UNLIKE, *MORE, *OVERLAPPING])
@pytest.mark.parametrize("family", FAMILY)
def test_processes_everywhere(family: str, plan: str) -> None:
    model, batch = FAMILIES[family]()
    executable = hgc.compile(model, batch, plan=lambda program, _: (SCHEDULES | UNLIKE | MORE | OVERLAPPING)[plan](program))
    for dtype in (torch.float32, torch.float64):
        assert executable.verify(dtype=dtype, steps=3).ok

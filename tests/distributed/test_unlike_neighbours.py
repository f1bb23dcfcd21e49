"""Every ordered pair of strategies as consecutive blocks of one model equals one device: loss, gradients, and weights after a step."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
import torch

import hgc
from hgc.backends.parity import reference
from hgc.backends.parity.compare import compare
from hgc.backends.parity.threads import run_ranks
from hgc.backends.parity.verify import make_case
from hgc.backends.parity.worker import run_rank
from hgc.plan import Plan, Stage
from hgc.strategy import Strategy
from tests.distributed.chains import chain, chains, every_layout, every_strategy
from tests.distributed.pipelines import emitted

LONGEST = 64


def check_chain(strategies: list[Strategy], folder: Path) -> None:
    """One block for each strategy, all on the same ranks, in float64."""
    model, batch = chain(len(strategies) - 2)  # embedding and loss are blocks too
    stored = reference.make(model, batch)
    case = make_case(stored, torch.float64, 1, seed=0)
    plan = Plan(stages=tuple(Stage(1, 0, strategy) for strategy in strategies))
    stages, info = emitted(hgc.trace(model, batch), plan, folder)
    outcomes = run_ranks(plan.devices, lambda _: run_rank(stages, info, case), timeout_s=600)
    for found in (outcomes[0], outcomes[-1]):
        report = compare(reference.run(stored, case), found, torch.float64, plan.devices, "chain", None)
        assert report.ok, f"{report}; worst at {[d.where for d in report.differences]}; {' -> '.join(map(str, strategies))}"


def test_chains_have_every_pair_once() -> None:
    for devices, count in ((4, 52), (8, 116)):
        found = every_strategy(devices)
        pairs = [pair for walk in chains(found, LONGEST) for pair in itertools.pairwise(walk)]
        assert len(found) == count
        assert sorted(pairs, key=str) == sorted(itertools.permutations(found, 2), key=str)


FOUR = list(chains(every_layout(4), LONGEST))


@pytest.mark.parametrize("walk", FOUR, ids=range(len(FOUR)))
def test_all_pairs_of_layouts_on_four_ranks(walk: list[Strategy], tmp_path: Path) -> None:
    check_chain(walk, tmp_path / "out")


def test_some_pairs_on_eight_ranks(tmp_path: Path) -> None:
    """Each layout once, in a fixed random order."""
    check_chain(random.Random(0).sample(every_layout(8), len(every_layout(8))), tmp_path / "out")


EVERY = [walk for devices in (4, 8) for walk in chains(every_strategy(devices), LONGEST)]


@pytest.mark.slow
@pytest.mark.parametrize("walk", EVERY, ids=range(len(EVERY)))
def test_all_pairs(walk: list[Strategy], tmp_path: Path) -> None:
    check_chain(walk, tmp_path / "out")

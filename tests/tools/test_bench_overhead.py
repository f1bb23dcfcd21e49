"""The overhead benchmark: its statistics, and that each baseline computes what the emitted program computes."""

from __future__ import annotations

import pytest

from hgc.errors import ArtifactError
from hgc.strategy import Strategy
from hgc.tools.bench import overhead
from hgc.tools.bench.overhead_baselines import by_hand, describe
from hgc.tools.bench.overhead_models import MODELS, Size, global_batch
from hgc.tools.bench.overhead_ratios import Pairs, Ratio, ratio
from hgc.tools.bench.overhead_worker import Case

TINY = Size(hidden=32, layers=2, heads=8, vocabulary=64, rows=4, length=16)


def test_ratio_is_taken_pair_by_pair() -> None:
    assert ratio([1.0, 20.0, 3.0], [1.0, 10.0, 2.0]) == Ratio(median=1.5, low=1.25, high=1.75)


def test_batches_differ_by_step_and_agree_between_processes() -> None:
    assert global_batch(TINY, 0)["input_ids"].equal(global_batch(TINY, 0)["input_ids"])
    assert not global_batch(TINY, 0)["input_ids"].equal(global_batch(TINY, 1)["input_ids"])


def test_descriptions() -> None:
    assert describe(Strategy()) == "eager model"
    assert describe(Strategy(dp=4)) == "DistributedDataParallel"
    assert describe(Strategy(dp=4, zero=3)) == "FSDP2, fully_shard per layer"
    assert describe(Strategy(tp=4)) == "DTensor tensor parallelism"
    assert describe(Strategy(dp=2, tp=2, zero=3)) == "DTensor tensor parallelism + fully_shard per layer"


def test_no_baseline_without_a_public_interface() -> None:
    with pytest.raises(ValueError, match="zero3"):
        by_hand(MODELS["Llama"](TINY), Strategy(dp=2, tp=2))


def test_a_baseline_that_computes_something_else_is_refused() -> None:
    pairs = Pairs((1.0, 1.0), (1.0, 1.0), (1.0, 1.0), (1.0, 1.0), loss_difference=0.01)
    with pytest.raises(ArtifactError, match=r"1\.0e-02"):
        overhead.row(Case("Llama", "dp4", TINY, "", 1, 2), pairs)


@pytest.mark.distributed
@pytest.mark.slow
def test_baselines_equal_the_emitted_programs() -> None:
    """On two processes; the benchmark itself checks the same on four."""
    comparisons = [("Llama", "dp1"), ("GPT-2", "dp2"), ("Llama", "dp2 zero3"), ("Llama", "tp2"), ("GPT-2", "tp2"), ("Llama", "pp2 micro2")]
    result = overhead.run(comparisons, TINY, pairs=2, warmup=1, compiled=[("GPT-2", "dp1")])
    assert sorted((row["model"], row["plan"]) for row in result["rows"]) == sorted([*comparisons, ("GPT-2", "dp1, blocks compiled")])
    assert all(row["loss_difference"] < 1e-5 and row["ratio"] > 0 and row["cpu_ratio"] > 0 for row in result["rows"])
    assert result["bench"] == "overhead"
    assert len(result["targets"]) == len(result["rows"])
    assert all(target.keys() == {"name", "value", "limit", "holds"} for target in result["targets"])

"""The benchmark measures, and says what it misses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hgc.errors import HgcError
from hgc.passes.sequence.costs import Fleet
from hgc.tools.bench import sequence
from hgc.tools.bench.sequence_published import MODELS, Lengths


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(0).lognormal(5.95, 1.26, 5000).clip(1, 150_000).astype(np.uint32)
    np.save(tmp_path / "wikipedia_lengths.npy", drawn)
    return tmp_path


def test_targets_follow_from_rows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence, "BATCHES", 1)
    monkeypatch.setattr(sequence, "_settings", lambda data: iter([(MODELS[0], name, 192) for name in data]))
    lengths, rows = Lengths(folder), list[sequence.Row]()
    targets = [*sequence._planner(lengths, rows, Fleet(16, 8), 40, 2, 1e-9), *sequence._beyond(lengths, rows)]
    assert [each["holds"] for each in targets[:2]] == [False, True]  # nobody plans in a nanosecond; degrees are never mixed for nothing
    gain = next(row["gain"] for row in rows if row["kind"] == "beyond" and row["data"] == "Wikipedia" and row["limit_k"] == 192)
    assert gain >= 1.0
    assert {row["kind"] for row in rows} == {"planner", "beyond"}


def test_batches_are_the_same_for_the_same_seed(folder: Path) -> None:
    first, again = Lengths(folder, 1), Lengths(folder, 1)
    for name in ("Wikipedia", "GitHub"):
        batch = first.batch(name, 192, 64, 3)
        assert (batch == again.batch(name, 192, 64, 3)).all()
        assert (batch != first.batch(name, 192, 64, 4)).any()
        assert batch.max() <= 192 * 1024


def test_no_lengths(tmp_path: Path) -> None:
    with pytest.raises(HgcError, match="name their folder with --data"):
        sequence.run()
    with pytest.raises(HgcError, match=r"wikipedia_lengths\.npy does not exist"):
        sequence.run(str(tmp_path))

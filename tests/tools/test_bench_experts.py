"""hgc's plans beside published ones: the published plan is simulated as the fidelity benchmark does, and slower plans miss the target."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from hgc.errors import HgcError
from hgc.passes.sharding.search.judged import in_words
from hgc.tools.bench import experts
from hgc.tools.bench.experts_plans import Alike, Compared, check_expert, compared, job_of, traced, with_room
from hgc.tools.bench.experts_plans import _published as published
from hgc.tools.bench.fidelity_models import NotRebuilt
from hgc.tools.bench.fidelity_predict import Case, Predictor, case_of
from hgc.tools.bench.fidelity_rows import read

SAMPLE = Path(__file__).parent / "samples" / "published_rows.csv"


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    rows = read(SAMPLE)[0]
    return {row.id: case_of(row, {}, rows) for row in rows if row.id in ("tiny-1", "tiny-2", "tiny-3", "tiny-4")}


@pytest.mark.parametrize("name", ["tiny-2", "tiny-4"])
def test_published_plans_are_simulated_as_in_fidelity(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    found, plan = published(case, Alike(case), traced(case))
    assert plan.devices == case.row.gpus
    assert found.step_s == pytest.approx(Predictor()(case).step_s, rel=1e-6)


def test_rows_of_one_job_share_a_search(cases: dict[str, Case]) -> None:
    """Two plans for one job: hgc's is the same in both rows, no slower than either, and fits the job."""
    pair = [cases["tiny-1"], cases["tiny-2"]]
    assert job_of(pair[0]) == job_of(pair[1])
    assert job_of(pair[0]) != job_of(cases["tiny-4"])
    found = compared(pair)
    assert [each.id for each in found] == ["tiny-1", "tiny-2"]
    assert [each.reason for each in found] == ["", ""]
    assert found[0].found == found[1].found
    assert found[0].published != found[1].published
    assert all(each.ratio >= experts.AS_FAST for each in found)


def test_who_counts_as_an_expert(cases: dict[str, Case]) -> None:
    check_expert(cases["tiny-1"])
    with pytest.raises(NotRebuilt, match="out of memory"):
        check_expert(cases["tiny-3"])
    with pytest.raises(NotRebuilt, match="none of Megatron-LM"):
        check_expert(replace(cases["tiny-1"], row=replace(cases["tiny-1"].row, framework="MaxText")))


def test_room_for_the_published_plan(cases: dict[str, Case]) -> None:
    cluster = cases["tiny-1"].cluster
    device_bytes = cluster.nodes[0].device.memory_bytes
    assert with_room(cluster, device_bytes / 2) is cluster
    assert with_room(cluster, 2.0 * device_bytes).nodes[0].device.memory_bytes == 2 * device_bytes + 1


def test_target_counts_slower_plans_and_missing_ones() -> None:
    fast, slow = Compared("a", "d", published_s=2.0, found_s=1.0), Compared("b", "d", published_s=1.0, found_s=2.0)
    missing, refused = Compared("c", "d", "hgc finds no plan", published_s=1.0), Compared("e", "d", "cannot be simulated")
    assert experts.target([fast, refused]) == {
        "name": "share of 1 rows in which hgc's plan is at least as fast as the published one, both simulated",
        "value": 1.0,
        "limit": 0.95,
        "holds": True,
    }
    assert experts.target([fast, slow])["value"] == 0.5
    assert experts.target([fast, missing])["value"] == 0.5
    assert not experts.target([refused])["holds"]


def test_jobs_and_what_is_left_out(tmp_path: Path) -> None:
    jobs, reasons = experts.jobs_of(SAMPLE)
    assert sorted(len(job) for job in jobs) == [1, 2]
    assert reasons == Counter(
        {"it ran out of memory": 1, "it is a mixture of experts": 1, "LoRA: the source does not state rank and targets": 1}
    )
    rows = SAMPLE.read_text(encoding="utf-8").splitlines()
    (tmp_path / "rows.csv").write_text("\n".join([rows[0], rows[5]]), encoding="utf-8")
    with pytest.raises(HgcError, match="holds no dense row of an expert's framework"):
        experts.jobs_of(tmp_path / "rows.csv")


def test_bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows in JSON, a drawn part of the jobs, and the error without data."""
    monkeypatch.setattr(
        experts, "compared", lambda job, _: [Compared(case.row.id, case.row.dataset, "", 1.0, 0.5, "dp8", "tp8") for case in job]
    )
    found = experts.run(str(SAMPLE))
    assert [row["ratio"] for row in found["rows"]] == [2.0] * 3
    assert found["targets"][0]["holds"]
    assert experts.run(str(SAMPLE), cases=1)["jobs"] == 1
    with pytest.raises(HgcError, match="give --data"):
        experts.run()


def test_words_of_plans(cases: dict[str, Case]) -> None:
    found, plan = published(cases["tiny-2"], Alike(cases["tiny-2"]), traced(cases["tiny-2"]))
    assert in_words(plan) == "pp2 dp2 tp2 zero1 no-sequence-parallel recompute 1f1b micro8"
    assert found.devices == 8

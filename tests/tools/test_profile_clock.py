"""How the profiler times: long enough, all ranks at work, operands cold, and without what comes before a collective."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hgc.backends.parity.threads import run_ranks
from hgc.tools.profile import clock, links
from hgc.tools.profile.clock import seconds
from hgc.tools.profile.cold import COLD_BYTES, in_turn, sets

CPU = torch.device("cpu")


def test_a_quick_call_is_repeated_until_it_takes_long() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        time.sleep(1e-4)

    (found,) = run_ranks(1, lambda _: seconds(call, CPU, together=False))
    assert found > 1e-4
    assert calls * found > clock.LONG_ENOUGH_S


@pytest.mark.parametrize(("together", "expected_s"), [(True, 0.5), (False, 0.4)])
def test_who_works_together_waits_for_the_slowest(together: bool, expected_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_run", lambda *_: (0.3, 0.5)[dist.get_rank()])
    assert run_ranks(2, lambda _: seconds(lambda: None, CPU, together)) == [pytest.approx(expected_s)] * 2


def test_the_median_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter([9.0, 0.2, 0.1])
    monkeypatch.setattr(clock, "_run", lambda *_: next(runs))
    assert run_ranks(1, lambda _: seconds(lambda: None, CPU, together=True)) == [0.2]


def test_other_ranks_are_at_work_before_and_after_what_is_timed() -> None:
    times: list[float] = []
    run_ranks(1, lambda _: clock._run(lambda: times.append(time.perf_counter()), CPU, 10))
    assert len(times) == 10 + 2 * round(10 * clock.LEAD)


def test_operands_take_turns_and_results_live_until_the_next() -> None:
    made = [torch.tensor(float(index)) for index in range(3)]
    seen: list[int] = []

    def nth(index: int) -> Tensor:
        seen.append(index)
        return made[index].clone()

    call = in_turn([lambda index=index: nth(index) for index in range(3)])  # type: ignore[misc]
    for _ in range(5):
        call()
    assert seen == [0, 1, 2, 0, 1]
    assert len(sets(CPU, COLD_BYTES // 4)) == 4
    assert len(sets(CPU, 2 * COLD_BYTES)) == 2
    assert len(sets(torch.device("cuda"), 1)) == 1


def test_a_collective_is_what_it_takes_beyond_the_product_in_front_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def timed(call: Callable[[], object], device: torch.device, together: bool) -> float:
        """Products take 2 s, collectives 1 s."""
        before = len(order)
        call()
        return 2.0 + (len(order) - before if together else 0)

    monkeypatch.setattr(links, "seconds", timed)
    before = links._Before(CPU)
    assert before.beyond(lambda: order.append("collective"), CPU) == 1.0
    assert 0 < before.beyond(lambda: None, CPU) < 0.1  # the noise of a product is no collective
    assert links._Before(torch.device("meta"))._pairs == []  # nothing stands in front on other devices

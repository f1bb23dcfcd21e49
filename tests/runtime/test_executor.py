"""The executor alone: workers that are plain functions, values that fan out, links without gradients, stages on the same ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hgc.backends.parity.threads import run_ranks
from hgc.errors import PlanError
from hgc.runtime.executor import Executor
from hgc.runtime.executor_exchange import side
from hgc.runtime.executor_messages import Link, Shape
from hgc.runtime.executor_transport import Mailboxes, open_transport
from hgc.schedule import Schedule, make

CPU = torch.device("cpu")
RANKS = {0: [0], 1: [1], 2: [2], 3: [0]}
"""Stage 0 makes ``a`` and the integers ``n``; 1 makes ``b`` from ``a``; 2 makes ``c`` from ``a``, ``b`` and ``n``; 3 reads ``c``."""
READS = {0: (), 1: ("a",), 2: ("a", "b", "n"), 3: ("c",)}
MAKES = {0: ("a", "n"), 1: ("b",), 2: ("c",), 3: ()}
SHAPES = {
    "a": Shape((2,), torch.float64),
    "b": Shape((2,), torch.float64),
    "c": Shape((2,), torch.float64),
    "n": Shape((2,), torch.int64),
}


def links() -> list[Link]:
    makers = {name: stage for stage, names in MAKES.items() for name in names}
    return [
        Link(name, makers[name], stage, side(RANKS[makers[name]][0], {}, {}), side(RANKS[stage][0], {}, {}), gradient=name != "n")
        for stage, names in READS.items()
        for name in names
    ]


@dataclass
class Worker:
    """Forward adds up what is received; the gradient of each input is the sum of the results' gradients, times two."""

    stage: int
    log: list[tuple[int, str, int]]
    back: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)

    def forward(self, micro_batch: int, received: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.append((self.stage, "F", micro_batch))
        self.values[micro_batch] = dict(received)
        total = torch.full((2,), float(micro_batch + 1), dtype=torch.float64)
        for tensor in received.values():
            total = total + tensor
        return {name: torch.tensor([micro_batch, 7]) if name == "n" else total for name in MAKES[self.stage]}

    def backward(self, micro_batch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        self.log.append((self.stage, "B", micro_batch))
        self.back[micro_batch] = gradients
        total = sum(gradients.values(), torch.zeros(2, dtype=torch.float64)) if gradients else torch.ones(2, dtype=torch.float64)
        return {name: 2 * total for name in READS[self.stage] if name != "n"}

    def backward_inputs(self, micro_batch: int, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return self.backward(micro_batch, gradients)

    def backward_weights(self, micro_batch: int) -> None:
        self.log.append((self.stage, "W", micro_batch))


def play(name: str, micro_batches: int = 4, trains: bool = True) -> tuple[dict[int, Worker], list[list[tuple[int, str, int]]], Schedule]:
    edges = [(0, 1), (0, 2), (1, 2), (2, 3)]
    schedule = make(name, [RANKS[stage] for stage in RANKS], micro_batches, edges)
    shared = links()

    def rank_main(rank: int) -> tuple[dict[int, Worker], list[tuple[int, str, int]]]:
        log: list[tuple[int, str, int]] = []
        workers = {stage: Worker(stage, log) for stage, ranks in RANKS.items() if rank in ranks}
        executor = Executor(schedule, shared, rank, open_transport(), CPU)
        executor.run(workers, SHAPES, trains)
        return workers, log

    found = run_ranks(3, rank_main, timeout_s=20)
    return {stage: worker for workers, _ in found for stage, worker in workers.items()}, [log for _, log in found], schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_values_fan_out_and_gradients_add_up(name: str) -> None:
    workers, logs, schedule = play(name)
    for batch in range(4):
        k = float(batch + 1)
        a, b = k, k + k
        assert workers[1].values[batch]["a"].tolist() == [a, a]
        assert workers[2].values[batch]["b"].tolist() == [b, b]
        assert workers[2].values[batch]["n"].tolist() == [batch, 7]
        assert workers[3].values[batch]["c"].tolist() == [k + a + b + batch, k + a + b + 7]
        # stage 3 gives 2; stage 2 gives 4 to a and to b; stage 1 gives 8 to a: 12 in all
        assert workers[2].back[batch]["c"].tolist() == [2.0, 2.0]
        assert workers[1].back[batch]["b"].tolist() == [4.0, 4.0]
        assert workers[0].back[batch]["a"].tolist() == [12.0, 12.0]
        assert workers[0].back[batch].keys() == {"a"}
    for rank, log in enumerate(logs):
        computed = [(a.stage, "B" if a.kind == "I" else a.kind, a.micro_batch) for a in schedule.lists[rank] if a.is_compute]
        assert log == computed


def test_forwards_alone() -> None:
    workers, logs, _ = play("1f1b", trains=False)
    assert all(kind == "F" for log in logs for _, kind, _ in log)
    assert len(workers[3].values) == 4


def swapped(schedule: Schedule, first: str, second: str) -> Schedule:
    text = str(schedule)
    assert f" {first} {second}" in text
    return Schedule.parse(text.replace(f" {first} {second}", f" {second} {first}", 1))


@pytest.mark.parametrize(("first", "second", "rank"), [("1RECV_F0", "1F0", 1), ("1F0", "1SEND_F0", 1), ("2RECV_B0", "2B0", 2)])
def test_a_swapped_action_is_refused_before_anything_is_sent(first: str, second: str, rank: int) -> None:
    schedule = swapped(make("gpipe", [RANKS[stage] for stage in RANKS], 2, [(0, 1), (0, 2), (1, 2), (2, 3)]), first, second)
    mailboxes = Mailboxes()
    with pytest.raises(PlanError, match=f"rank {rank} is stuck at {second}"):
        Executor(schedule, links(), rank, mailboxes.of(rank), CPU)
    assert not mailboxes.sent


def test_a_message_that_does_not_fit_is_named() -> None:
    mailboxes = Mailboxes(timeout_s=0.1)
    mailboxes.of(0).send(torch.zeros(3), 1)
    with pytest.raises(ValueError, match=r"rank 1 expected torch.float64 \(2,\) from rank 0, which sent torch.float32 \(3,\)"):
        mailboxes.of(1).receive(torch.zeros(2, dtype=torch.float64), 0).wait()
    with pytest.raises(TimeoutError, match="rank 1 waited 0 s for message 0 of rank 2"):
        mailboxes.of(1).receive(torch.zeros(2), 2).wait()


def sequence(messages: Sequence[Tensor]) -> list[float]:
    return [float(message) for message in messages]


def test_messages_are_taken_in_the_order_in_which_they_were_sent() -> None:
    mailboxes = Mailboxes()
    sender, receiver = mailboxes.of(0), mailboxes.of(1)
    for value in (1.0, 2.0, 3.0):
        sender.send(torch.tensor(value), 1)
    buffers = [torch.zeros(()) for _ in range(3)]
    handles = [receiver.receive(buffer, 0) for buffer in buffers]
    for handle in reversed(handles):
        handle.wait()
    assert sequence(buffers) == [1.0, 2.0, 3.0]

"""Bytes and seconds of values that change meshes, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from hgc.cluster import Cluster
from hgc.cost.collectives import place, time_s
from hgc.cost.exchange import Crossing, between_nodes_bytes, exchange_s, sent_bytes
from hgc.runtime.executor_exchange import side

CLUSTER = Cluster.preset("a100-80", nodes=2, per_node=2)
ROWS = side(0, {"dp": 4}, {"dp": "S(0)"})
COLUMNS = side(0, {"sp": 4}, {"sp": "S(1)"})
WHOLE = side(0, {"tp": 4}, {"tp": "I"})


def test_rows_to_columns_is_an_all_to_all() -> None:
    sent = sent_bytes([Crossing(ROWS, COLUMNS, 3, 1600.0)])
    assert (sent == 100 * (1 - np.eye(4))).all()
    assert between_nodes_bytes(CLUSTER, 0, 0, sent) == 800
    assert exchange_s(CLUSTER, 0, 0, sent) == time_s("send", 200, place(CLUSTER, (0, 2)))


def test_what_is_whole_is_cut_where_it_is() -> None:
    assert not sent_bytes([Crossing(WHOLE, ROWS, 3, 1600.0), Crossing(WHOLE, COLUMNS, 2, 10.0)]).any()


def test_rows_to_whole_is_an_all_gather() -> None:
    sent = sent_bytes([Crossing(ROWS, WHOLE, 3, 1600.0)] * 2)
    assert (sent == 800 * (1 - np.eye(4))).all()


def test_a_gradient_that_ranks_add_up_goes_to_one_of_them() -> None:
    summed = side(0, {"dp": 4}, {"dp": "R"})
    sent = sent_bytes([Crossing(ROWS, summed, 3, 1600.0, gradient=True)])
    assert sent[:, 0].tolist() == [0, 400, 400, 400]
    assert not sent[:, 1:].any()


def test_messages_of_a_rank_share_its_link() -> None:
    """Two to ranks of another node, one to a neighbour."""
    sent = np.array([[0.0, 0.0], [5e6, 3e6]])
    assert exchange_s(CLUSTER, 0, 2, sent) == pytest.approx(time_s("send", 8e6, place(CLUSTER, (1, 2))))
    inside = np.array([[0.0, 0.0], [5e6, 0.0]])
    assert exchange_s(CLUSTER, 0, 0, inside) == pytest.approx(time_s("send", 5e6, place(CLUSTER, (1, 0))))

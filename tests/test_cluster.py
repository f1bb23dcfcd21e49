"""Clusters: JSON round trip and errors that name the thing and the remedy."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hgc.cluster import Cluster, Device, Link, Node
from hgc.errors import ClusterError

speeds = st.floats(1e-3, 1e18)
links = st.builds(Link, latency_s=st.floats(0, 10), bytes_per_s=speeds)
devices = st.builds(
    Device,
    name=st.text(),
    type=st.just("cuda"),
    memory_bytes=st.integers(1, 2**50),
    memory_bytes_per_s=speeds,
    float32_flops_per_s=speeds,
    bfloat16_flops_per_s=speeds,
)
nodes = st.lists(st.builds(Node, device=devices, count=st.integers(1, 16), link=links), min_size=1, max_size=4).map(tuple)
clusters = st.builds(Cluster, nodes=nodes, link=links, name=st.text())


@given(clusters)
def test_json_round_trip(cluster: Cluster) -> None:
    assert Cluster.from_json(cluster.to_json()) == cluster


@given(clusters)
def test_devices_are_counted_over_nodes(cluster: Cluster) -> None:
    assert cluster.devices == sum(node.count for node in cluster.nodes)
    assert cluster.backend == "nccl"
    assert str(cluster.devices) in str(cluster)


def test_local() -> None:
    cluster = Cluster.local(4)
    assert (cluster.devices, cluster.device_type, cluster.backend) == (4, "cpu", "gloo")
    assert cluster.nodes[0].device.memory_bytes * 4 <= Cluster.local(1).nodes[0].device.memory_bytes


def test_save_and_load(tmp_path: Path) -> None:
    cluster = Cluster.local(2)
    cluster.save(tmp_path / "cluster.json")
    assert Cluster.load(tmp_path / "cluster.json") == cluster


def _document(**changes: Any) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(Cluster.local(2).to_json())
    return content | changes


def _device(**changes: Any) -> dict[str, Any]:
    content = _document()
    content["nodes"][0]["device"].update(changes)
    return content


MISTAKES = [
    ({}, "version None; this hgc reads version 1"),
    ([], "not a JSON object"),
    (_document(nodes=[]), "has no nodes; give at least one"),
    (_document(nodes={}), "nodes is {}; expected a list"),
    (_document(nodes=_document()["nodes"] * 2), "has 2 nodes and no link between them"),
    (_document(node=[]), "unknown key 'node'; did you mean 'nodes'?"),
    (_document(nodes=[{}]), "nodes[0] lacks 'device', 'count', 'link'; add them"),
    (_device(type="gpu"), "nodes[0].device: device type is 'gpu'; expected one of cpu, cuda"),
    (_device(memory_bytes=-1), "nodes[0].device: memory_bytes is -1; expected a whole number of 1 or more"),
    (_device(memory_bytes=1.5), "memory_bytes is 1.5; expected a whole number"),
    (_device(float32_flops_per_s=0), "float32_flops_per_s is 0.0; expected a number above 0"),
    (_device(memory="80 GB"), "unknown key 'memory' in nodes[0].device; did you mean 'memory_bytes'?"),
]


@pytest.mark.parametrize(("content", "sentence"), MISTAKES)
def test_mistakes_in_json(content: Any, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(json.dumps(content))
    with pytest.raises(ClusterError, match=re.escape(sentence)):
        Cluster.load(tmp_path / "cluster.json")


@pytest.mark.parametrize("count", [0, -1, 1.5, "4", True])
def test_local_wants_a_whole_number(count: Any) -> None:
    with pytest.raises(ClusterError, match="expected a whole number of 1 or more"):
        Cluster.local(count)


def test_one_program_runs_on_one_device_type() -> None:
    cpu = Cluster.local(1).nodes[0]
    cuda = Node(Device("gpu", "cuda", 1, 1.0, 1.0, 1.0), 1, cpu.link)
    with pytest.raises(ClusterError, match="mixes device types cpu and cuda"):
        Cluster((cpu, cuda), link=cpu.link)

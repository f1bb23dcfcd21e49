"""Cluster presets, unlike nodes, and the published schema."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hgc.cluster import Cluster, Kernels, Link, device_preset, network_preset, presets
from hgc.cost.cluster_schema import schema
from hgc.errors import ClusterError

SCHEMA = Path(__file__).parents[2] / "docs" / "design" / "cluster.schema.json"


@pytest.mark.parametrize("name", presets())
def test_device_presets(name: str) -> None:
    cluster = Cluster.preset(name, nodes=2)
    assert cluster.devices == 2 * device_preset(name).node.count
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert not list(_violations(json.loads(cluster.to_json()), schema(), schema()))
    assert device_preset(name).sources


@pytest.mark.parametrize("name", presets("network"))
def test_network_presets(name: str) -> None:
    cluster = Cluster.preset("a100-80", nodes=4, network=name)
    assert cluster.link == network_preset(name).link
    assert cluster.nodes[0].uplinks == network_preset(name).uplinks
    assert network_preset(name).sources


def test_names_that_the_issue_asks_for() -> None:
    assert set(presets()) >= {"v100-16", "v100-32", "a100-40", "a100-80", "h100", "h200", "b200", "gb200", "rtx4090", "cpu"}


def test_specifications() -> None:
    device = Cluster.preset("a100-80").nodes[0].device
    assert (device.memory_bytes, device.memory_bytes_per_s, device.bfloat16_flops_per_s) == (80 * 2**30, 2039e9, 312e12)
    assert (device.float8_flops_per_s, device.kernels.units) == (None, 108)
    rack = Cluster.preset("gb200")
    assert (rack.devices, len(rack.nodes)) == (72, 1)


def test_part_of_a_node_has_its_part_of_the_uplinks() -> None:
    cluster = Cluster.preset("h100", nodes=2, per_node=4)
    assert (cluster.devices, cluster.nodes[0].uplinks) == (8, 4)
    assert Cluster.preset("a100-80", nodes=2, per_node=1, network="efa-p4d").nodes[0].uplinks == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"name": "a100"}, "no device is called 'a100'; did you mean 'a100-40' or 'a100-80'?"),
        ({"name": "H100"}, "no device is called 'H100'; did you mean 'h100'?"),
        ({"name": "groq"}, "no device is called 'groq'; expected one of a100-40"),
        ({"name": "h100", "network": "infiniband"}, "no network is called 'infiniband'; did you mean 'infiniband-4x100'"),
        ({"name": "h100", "nodes": 0}, "nodes is 0; expected a whole number of 1 or more"),
        ({"name": "h100", "per_node": 2.5}, "per_node is 2.5; expected a whole number of 1 or more"),
    ],
)
def test_mistakes(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(sentence)):
        Cluster.preset(**arguments)


def test_unlike_nodes() -> None:
    fast, slow = Cluster.preset("h100").nodes[0], Cluster.preset("a100-80", per_node=4).nodes[0]
    cluster = Cluster((fast, slow), link=network_preset("infiniband-8x200").link)
    assert cluster.devices == 12
    assert Cluster.from_json(cluster.to_json()) == cluster


@pytest.mark.parametrize(
    ("build", "sentence"),
    [
        (lambda: Kernels(matmul_efficiency=1.5), "matmul_efficiency is 1.5; expected a share of the peak, above 0 and at most 1"),
        (lambda: Kernels(wave_sharpness=2.0), "wave_sharpness is 2.0; expected a number from 0 to 1"),
        (lambda: Kernels(units=0), "units is 0; expected a whole number of 1 or more"),
        (lambda: Link(0.0, 1e9, efficiency=0.0), "efficiency is 0.0; expected a number above 0"),
        (lambda: replace(Cluster.preset("cpu").nodes[0], uplinks=0), "uplinks is 0; expected a whole number of 1 or more"),
        (
            lambda: replace(Cluster.preset("cpu").nodes[0].device, float8_flops_per_s=0.0),
            "float8_flops_per_s is 0.0; expected a number above 0",
        ),
    ],
)
def test_wrong_constants(build: Any, sentence: str) -> None:
    with pytest.raises(ClusterError, match=re.escape(sentence)):
        build()


def test_published_schema_is_current() -> None:
    assert json.loads(SCHEMA.read_text()) == schema()


@pytest.mark.parametrize(
    "wrong", [{"version": 2}, {"nodes": []}, {"nodes": [{}]}, {"extra": 1}, {"link": {"latency_s": -1, "bytes_per_s": 1}}]
)
def test_schema_refuses_what_the_reader_refuses(wrong: dict[str, Any]) -> None:
    content = json.loads(Cluster.preset("h100", nodes=2).to_json()) | wrong
    assert list(_violations(content, schema(), schema()))
    with pytest.raises(ClusterError):
        Cluster.from_json(json.dumps(content))


def _violations(value: Any, rule: dict[str, Any], root: dict[str, Any]) -> Any:
    """Enough of JSON schema for ours: yields what is wrong."""
    if "$ref" in rule:
        rule = root["$defs"][rule["$ref"].rsplit("/", 1)[-1]]
    if "anyOf" in rule:
        if all(list(_violations(value, option, root)) for option in rule["anyOf"]):
            yield f"{value!r} fits no option"
        return
    if "const" in rule:
        if value != rule["const"]:
            yield f"{value!r} is not {rule['const']!r}"
        return
    types = {"object": dict, "array": list, "integer": int, "number": (int, float), "string": str, "null": type(None)}
    if not isinstance(value, types[rule["type"]]) or isinstance(value, bool):
        yield f"{value!r} is no {rule['type']}"
    elif rule["type"] == "object":
        yield from (f"lacks {name}" for name in rule["required"] if name not in value)
        yield from (f"unknown {name}" for name in value if name not in rule["properties"])
        for name in value.keys() & rule["properties"].keys():
            yield from _violations(value[name], rule["properties"][name], root)
    elif rule["type"] == "array":
        if len(value) < rule["minItems"]:
            yield "too short"
        for item in value:
            yield from _violations(item, rule["items"], root)
    elif rule["type"] in ("integer", "number"):
        low = value < rule.get("minimum", value) or ("exclusiveMinimum" in rule and value <= rule["exclusiveMinimum"])
        if low or value > rule.get("maximum", value):
            yield f"{value!r} out of range"

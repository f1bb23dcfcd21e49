"""Times of blocks: what kernels and collectives they are made of, in which order, and how fast they are evaluated."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from hgc.cluster import Cluster
from hgc.cost.collectives import time_s
from hgc.cost.compute import attention_time_s, causal_pairs, matmul_time_s, memory_time_s
from hgc.cost.execution import Execution
from hgc.cost.places import axis_places, group_place
from hgc.cost.stage_time import BlockTime, Segment, StageTimes
from hgc.cost.symbolic import exact
from hgc.errors import HgcError
from hgc.plan import Precision
from hgc.strategy import Strategy
from tests.cost.small import costs, lowered, lowered_costs

CLUSTER = Cluster.preset("h100", nodes=2)
DEVICE = CLUSTER.nodes[0].device
SIZES = {"b": 64, "s": 512, "t": 512}


def times(family: str, text: str, execution: Execution = Execution(), **more: str) -> dict[str, BlockTime]:  # noqa: B008
    plan = lowered(family, text)[1]
    strategy = replace(plan.strategy, recompute=more.pop("recompute", "none"))
    found = StageTimes(lowered_costs(family, text), strategy, Precision(**more), execution)
    return found(SIZES, DEVICE, axis_places(CLUSTER, plan.mesh))


def test_a_block_takes_what_its_kernels_take() -> None:
    """The products and attention of a layer, counted by hand; the rest is memory-bound."""
    layer = costs("llama").bodies["LlamaDecoderLayer"]
    rows = 64 * 512
    shapes = {"q": (64, 64), "k": (32, 64), "v": (32, 64), "o": (64, 64), "gate": (128, 64), "up": (128, 64), "down": (64, 128)}
    forward = sum(matmul_time_s(DEVICE, rows, n, k, dtype="float32") for n, k in shapes.values())
    forward += attention_time_s(DEVICE, 64, 8, 512, 512, 8, "float32", pairs=causal_pairs(512.0, 512.0))
    moves = sum(node.forward.moves for node in layer.nodes)
    sizes = {symbol: SIZES[symbol.name] for symbol in costs("llama").symbols}
    bytes_ = sum(float(exact(node.forward.moved_bytes, sizes)) for node in layer.nodes)
    found = StageTimes(costs("llama"), Strategy())(SIZES, DEVICE, {})["LlamaDecoderLayer"]
    assert found.forward == (Segment(found.forward_s),)
    assert found.forward_s == pytest.approx(forward + memory_time_s(DEVICE, bytes_, moves))
    weights = sum(matmul_time_s(DEVICE, n, k, rows, dtype="float32") for n, k in shapes.values())
    assert found.backward_weight_s == pytest.approx(weights)
    assert found.backward_s == pytest.approx(found.backward_input_s + found.backward_weight_s)


def test_collectives_stand_where_the_program_has_them() -> None:
    found = times("llama", "dp2 tp2")["LlamaDecoderLayer"]
    place = axis_places(CLUSTER, {"dp": 2, "tp": 2})["tp"]
    kinds = [segment.collective for segment in found.forward if segment.collective]
    assert kinds == ["all_gather", "reduce_scatter"] * 2
    for segment in found.forward:
        if segment.collective:
            assert segment.payload_bytes == 32 * 512 * 64 * 4
            assert segment.seconds == time_s(segment.collective, segment.payload_bytes, place)  # type: ignore[arg-type]
    backward = [segment.collective for segment in found.backward if segment.collective and segment.payload_bytes > 1000]
    assert backward == ["all_gather", "reduce_scatter"] * 2


def test_recomputation_runs_forward_again() -> None:
    plain, full = times("llama", "tp2")["LlamaDecoderLayer"], times("llama", "tp2", recompute="full")["LlamaDecoderLayer"]
    assert full.forward == plain.forward
    assert 0 < full.recompute_s < full.forward_s  # without the scatter after the last product
    assert full.backward_input_s == pytest.approx(plain.backward_input_s + full.recompute_s)
    assert full.backward_weight_s == plain.backward_weight_s
    whole = times("llama", "tp2", Execution(recompute_stops_early=False), recompute="full")["LlamaDecoderLayer"]
    assert whole.recompute_s == pytest.approx(whole.forward_s)
    core = times("llama", "tp2", recompute="selective")["LlamaDecoderLayer"]
    attention = attention_time_s(DEVICE, 64, 4, 512, 512, 8, "float32", pairs=causal_pairs(512.0, 512.0))
    assert core.recompute_s == pytest.approx(attention)
    assert times("llama", "tp2", recompute="full")["Head"] == times("llama", "tp2")["Head"]


def test_fused_chains_move_less() -> None:
    for family in ("llama", "gpt2", "t5"):
        eager, fused = times(family, "dp2"), times(family, "dp2", Execution(fused=True))
        for name in eager:
            assert fused[name].forward_s <= eager[name].forward_s
            assert fused[name].backward_s <= eager[name].backward_s
    launch_free = times("llama", "dp2", Execution(launch_free=True))["LlamaDecoderLayer"]
    assert launch_free.forward_s < times("llama", "dp2")["LlamaDecoderLayer"].forward_s


def test_kernels_that_are_waited_for_each_take_the_host_s_time() -> None:
    eager, blocking = (times("llama", "dp2", Execution(dispatch_s=each))["LlamaDecoderLayer"] for each in (0.0, 1e-3))
    nodes = lowered_costs("llama", "dp2").bodies["LlamaDecoderLayer"].nodes
    products = sum(len(node.forward.products) + len(node.forward.attentions) for node in nodes)
    kernels = products + sum(node.forward.moves for node in nodes)
    assert blocking.forward_s - eager.forward_s == pytest.approx(kernels * 1e-3)
    assert blocking.backward_s - eager.backward_s > products * 1e-3


def test_narrow_products_are_faster_where_they_are_large() -> None:
    assert times("llama", "tp2", products="float8")["Head"] == times("llama", "tp2")["Head"]
    with pytest.raises(HgcError, match="float4"):
        times("llama", "tp2", products="float4")


def test_a_group_sits_where_its_slowest_ranks_sit() -> None:
    places = axis_places(CLUSTER, {"dp": 2, "tp": 8})
    assert (places["dp"].nodes, places["tp"].nodes) == (2, 1)
    assert axis_places(CLUSTER, {"dp": 2, "tp": 4})["dp"].nodes == 1
    assert axis_places(CLUSTER, {"dp": 2, "tp": 4}, first_rank=4)["dp"].nodes == 2
    assert group_place(CLUSTER, {"dp": 2, "cp": 2, "tp": 4}, ("dp", "cp")).per_node == 2


def test_missing_sizes_and_places_are_named() -> None:
    found = StageTimes(lowered_costs("llama", "tp2"), Strategy(tp=2))
    with pytest.raises(HgcError, match="the size 's' is missing"):
        found({"b": 1}, DEVICE, {})
    with pytest.raises(HgcError, match="axis 'tp' sit"):
        found(SIZES, DEVICE, {})


def test_evaluation_is_quick() -> None:
    """Less than a millisecond a body, after the first time."""
    found = StageTimes(lowered_costs("t5", "dp2 tp2"), Strategy(dp=2, tp=2))
    places = axis_places(CLUSTER, {"dp": 2, "tp": 2})
    found({"b": 64, "s": 32, "t": 32}, DEVICE, places)
    spent = []
    for s in range(64, 84):
        start = time.perf_counter()
        bodies = found({"b": 64, "s": s, "t": s}, DEVICE, places)
        spent.append((time.perf_counter() - start) / len(bodies))
    assert min(spent) < 1e-3

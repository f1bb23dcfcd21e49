"""Activation memory against the formulas and tables of "Reducing Activation Recomputation in Large Transformer Models" (Korthikanti et al.
2022), with a GPT whose attention is written out, as theirs was."""

from __future__ import annotations

import csv
import re
from functools import cache
from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc.compiler import distribute
from hgc.cost.execution import Execution
from hgc.cost.memory import memory
from hgc.cost.retention import program_retained, retained
from hgc.cost.symbolic import ProgramCosts, exact
from hgc.ir.program import Program
from hgc.passes.analysis.costs import BlockCosts
from hgc.plan import Plan, Precision
from hgc.strategy import Strategy
from hgc.tracing import trace

SAMPLE = Path(__file__).parent / "samples" / "activation_memory_korthikanti.csv"
MEGATRON = Execution(fused=True, autocast=False, regathers=True, recompute_written_attention=True, recompute_stops_early=False)
"""Fused softmax with mask and scale, fused bias and GELU, layer norms that keep their input, parts of sequences gathered again."""
SEQUENCE = 2048


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))
        self.out = nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor, hidden_scores: Tensor) -> Tensor:
        x = x + F.dropout(self.out(self.attend(self.norm1(x), hidden_scores)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1)

    def attend(self, x: Tensor, hidden_scores: Tensor) -> Tensor:
        b, s, h = x.shape
        q, k, v = (project(x).view(b, s, self.heads, h // self.heads).transpose(1, 2) for project in (self.query, self.key, self.value))
        scores = (q @ k.transpose(2, 3) * (h // self.heads) ** -0.5).masked_fill(hidden_scores, -1e4)
        return (F.dropout(F.softmax(scores, -1), 0.1) @ v).transpose(1, 2).reshape(b, s, h)


class Gpt(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(51200, hidden), nn.Embedding(SEQUENCE, hidden)
        self.layers = nn.ModuleList(Layer(hidden, heads) for _ in range(2))
        self.norm = nn.LayerNorm(hidden)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = F.dropout(self.words(ids) + self.positions(positions), 0.1)
        later = positions[:, None] < positions
        for layer in self.layers:
            x = layer(x, later)
        logits = F.linear(self.norm(x), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


@cache
def lowered(hidden: int, heads: int, text: str) -> tuple[Program, Plan, ProgramCosts]:
    plan = Plan(Strategy.parse(text), precision=Precision(parameters="bfloat16", master="float32", gradients="float32"))
    with torch.device("meta"):
        model = Gpt(hidden, heads).to(torch.bfloat16)
    ids = torch.empty(4, SEQUENCE, dtype=torch.int64, device="meta")
    program = distribute(trace(model, {"ids": ids, "labels": ids}), plan) if plan.devices > 1 else trace(model, {"ids": ids, "labels": ids})
    return program, plan, BlockCosts(plan.precision, MEGATRON).run(program)


def rows(quantity: str, model: str = "") -> list[dict[str, str]]:
    if not SAMPLE.exists():
        pytest.skip("the published rows are not here")
    with SAMPLE.open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["quantity"] == quantity and row["model"] == model]


def per_layer(hidden: int, heads: int, text: str, recompute: str, b: int = 4) -> int:
    """Bytes that one layer keeps for backward, its input too."""
    program, _, costs = lowered(hidden, heads, text)
    (body,) = (body for body in costs.bodies.values() if body.name == "Layer")
    kept = retained(body, recompute, MEGATRON)
    inputs = [body.inputs[position] for position in kept.inputs if not body.state[position]]
    total = kept.inside + sum(each.bytes for each in inputs if each.has_gradient)
    return exact(total, {symbol: {"b": b, "s": SEQUENCE}[symbol.name] for symbol in program.symbols})


@pytest.mark.parametrize(
    ("formula", "text", "recompute"),
    [
        ("no_parallelism", "dp1", "none"),
        ("tensor_parallel", "tp8 no-sequence-parallel", "none"),
        ("tensor_sequence_parallel", "tp8", "none"),
        ("tensor_parallel_selective", "tp8 no-sequence-parallel", "selective"),
        ("tensor_sequence_parallel_selective", "tp8", "selective"),
        ("full_recompute", "tp8 no-sequence-parallel", "full"),
    ],
)
def test_a_layer_keeps_what_the_formulas_say(formula: str, text: str, recompute: str) -> None:
    """Within 0.1 %: the formulas leave out the statistics of layer norms."""
    (row,) = rows(f"formula_activation_bytes_per_layer_{formula}")
    hidden, heads = 6144, 64
    known = {"s": SEQUENCE, "b": 4, "h": hidden, "a": heads, "t": Strategy.parse(text).tp}
    expected = eval(row["value"], {}, known)
    assert per_layer(hidden, heads, text, recompute) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(("model", "hidden", "heads", "b"), [("22b", 6144, 64, 4), ("175b", 12288, 96, 1)])
def test_shares_of_the_baseline(model: str, hidden: int, heads: int, b: int) -> None:
    """The paper's figure 7, in per cent of tensor parallelism alone."""
    baseline = per_layer(hidden, heads, "tp8 no-sequence-parallel", "none", b)
    for quantity, text, recompute in (
        ("activation_memory_seq_parallel", "tp8", "none"),
        ("activation_memory_selective_recompute", "tp8 no-sequence-parallel", "selective"),
        ("activation_memory_seq_parallel_and_selective", "tp8", "selective"),
        ("activation_memory_full_recompute", "tp8 no-sequence-parallel", "full"),
    ):
        (row,) = rows(quantity, model)
        assert 100 * per_layer(hidden, heads, text, recompute, b) / baseline == pytest.approx(float(row["value"]), rel=6e-3), quantity


def test_state_and_activations_in_gibibytes() -> None:
    """The paper's figure 1, 22 billion parameters: 48 layers, without embeddings and vectors, which its numbers leave out."""
    program, plan, costs = lowered(6144, 64, "tp8")
    found = memory(program, plan, costs, execution=MEGATRON)
    state = exact(found.parameters + found.master + found.gradients + found.optimizer, {})
    parameters = [
        (name, sympy.Mul(*entry.value.local_shape(program.mesh))) for name, entry in program.state.items() if entry.kind == "parameter"
    ]
    assert state == 18 * sum(int(numel) for _, numel in parameters)  # 2 + 4 + 4 + 8 bytes a parameter
    matrices = sum(int(numel) for name, numel in parameters if re.fullmatch(r"layers\.0\.(query|key|value|out|up|down)\.weight", name))
    (row,) = rows("params_and_optimizer_state_gib", "22b")
    assert 18 * 48 * matrices / 2**30 == pytest.approx(float(row["value"]))
    for quantity, text, recompute in (
        ("activations_gib_tensor_parallel_baseline", "tp8 no-sequence-parallel", "none"),
        ("activations_gib_seq_parallel_selective", "tp8", "selective"),
    ):
        (row,) = rows(quantity, "22b")
        assert 48 * per_layer(6144, 64, text, recompute) / 2**30 == pytest.approx(float(row["value"]), rel=1e-3)


def test_recomputation_of_a_whole_program() -> None:
    """Blocks keep their inputs, and one block at a time has all the rest."""
    program, _, costs = lowered(6144, 64, "tp8 no-sequence-parallel")
    none, full = (program_retained(program, costs.bodies, {"Layer": kind}, MEGATRON) for kind in ("none", "full"))
    sizes = {symbol: {"b": 4, "s": SEQUENCE}[symbol.name] for symbol in program.symbols}
    layer = retained(costs.bodies["Layer"], "none", MEGATRON)
    assert exact(none.saved_bytes - full.saved_bytes, sizes) == 2 * exact(layer.inside, sizes)
    assert exact(full.recomputed, sizes) == exact(layer.inside, sizes)
    assert exact(none.recomputed, sizes) == 0

"""Libraries' models trace through their extension points; odd modules through registered replacements."""

from __future__ import annotations

import types

import pytest
import torch
from torch import Tensor, nn

from hgc import trace
from hgc.errors import TraceError
from hgc.ir.ops.attention import attention
from hgc.ir.ops.moe import grouped_linear, moe_combine, moe_dispatch
from hgc.ir.program import Program
from hgc.tools.bench import zoo
from hgc.tools.bench.trace_parity import compare
from hgc.tracing.adapters import adapter
from hgc.tracing.adapters.modules import _ADAPTERS


def _count(program: Program, target: object) -> int:
    return sum(n.target is target for body in program.bodies.values() for n in body.graph.nodes)


def test_experts_are_three_operators() -> None:
    entry = zoo.find("Switch")
    torch.manual_seed(0)
    model = entry.build("small")
    program = trace(model, entry.batch(2, 9))
    sparse = 2  # kinds of blocks with experts
    assert (_count(program, moe_dispatch), _count(program, grouped_linear), _count(program, moe_combine)) == (sparse, 2 * sparse, sparse)
    assert compare(model, program, entry.batch(3, 7)).worst <= 1e-5


def test_windows_that_only_masks_know_stay_masks() -> None:
    entry = zoo.find("Gemma 2")
    model = entry.build("small")
    for module in model.modules():
        if "sliding_window" in vars(module):
            module.sliding_window = None  # type: ignore[assignment]
    program = trace(model, entry.batch(2, 9))
    assert {n.args[6] for body in program.bodies.values() for n in body.graph.nodes if n.target is attention} == {0}
    assert compare(model, program, entry.batch(2, 12)).worst <= 1e-5
    assert program.report == ["Sliding windows are masks: the model's attention is not told its window."]


def test_a_user_mask_is_one_boolean_bias() -> None:
    entry = zoo.find("Llama, padded")
    program = trace(entry.build("small"), entry.batch(2, 9))
    (node,) = (n for n in program.body("LlamaDecoderLayer").graph.nodes if n.target is attention)
    bias = node.args[3]
    assert isinstance(bias, torch.fx.Node)
    assert bias.name == "mask"
    assert bias.meta["hgc"].value.dtype == torch.bool


class LoopedExperts(nn.Module):
    """Experts in a loop whose shapes depend on where tokens go."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if rows.numel():
                y[rows] = expert(x[rows]) * weights[rows, None]
        return y.square().mean()


def test_registered_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = LoopedExperts(), {"x": torch.randn(7, 8)}
    with pytest.raises(TraceError, match=r"hgc.tracing.adapters.adapter"):
        trace(model, batch)
    monkeypatch.setitem(_ADAPTERS, "LoopedExperts", _ADAPTERS.get("LoopedExperts", lambda module: None))

    @adapter("LoopedExperts")
    def _(module: nn.Module) -> None:
        def forward(self: LoopedExperts, x: Tensor) -> Tensor:
            weights, chosen = self.router(x).softmax(-1).max(-1, keepdim=True)
            rows, offsets, order = torch.ops.hgc.moe_dispatch(x, chosen, 3)
            products = torch.ops.hgc.grouped_linear(rows, torch.stack([e.weight for e in self.experts]), offsets, False)
            return torch.ops.hgc.moe_combine(products, order, weights).square().mean()  # type: ignore[no-any-return]

        vars(module)["forward"] = types.MethodType(forward, module)

    assert compare(model, trace(model, batch), {"x": torch.randn(9, 8)}).worst <= 1e-6


def test_position_ids_of_the_user_may_pack_sequences() -> None:
    entry = zoo.find("Llama")
    model = entry.build("small")
    model.config.use_cache = False  # with a cache transformers ignores packing
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]] * 2)
    batch = {**entry.batch(2, 9), "position_ids": positions}
    program = trace(model, batch)
    assert compare(model, program, batch).worst <= 1e-5
    plain = {**batch, "position_ids": torch.arange(9).expand(2, 9).contiguous()}
    assert compare(model, program, plain).worst <= 1e-5
    model.config.use_cache = True
    assert compare(model, trace(model, batch), batch).worst <= 1e-5


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("Falcon", {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}),
        ("Bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4}),
        ("GPTNeo", {"hidden_size": 64, "num_layers": 4, "num_heads": 4, "attention_types": [[["global", "local"], 2]], "window_size": 8}),
        ("Mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "max_seq_len": 64}),
    ],
)
def test_models_that_compute_attention_themselves_keep_their_masks(name: str, config: dict[str, object]) -> None:
    """They ask transformers for masks but never call its attention functions: leaving the mask to an attribute would lose it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    common = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**common, **config)).eval()
    ids = torch.randint(1, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    program = trace(model, {"input_ids": ids, "labels": ids})
    expected = model(input_ids=ids, labels=ids).loss.detach()
    found = program.run({"input_ids": ids, "labels": ids}, model.state_dict()).detach()
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert any(f"{name}Config compute attention themselves" in sentence for sentence in program.report)

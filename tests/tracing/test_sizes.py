"""Symbolic sizes: which dims vary, what pins them, and what tracing assumed about them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hgc import trace
from hgc.errors import HgcError, TraceError
from tests.tracing.small import Layer, Stack, Step, ids


def test_batch_and_sequence_by_convention() -> None:
    program = trace(Stack([Layer(), Layer()]), ids(4, 8))
    meanings = {str(symbol): (found.meaning, found.hint) for symbol, found in program.symbols.items()}
    assert meanings == {"b": ("batch", 4), "s": ("sequence", 8)}


@pytest.mark.parametrize(("b", "s"), [(1, 1), (1, 7), (2, 1), (8, 8)])
def test_other_sizes_than_traced(b: int, s: int) -> None:
    torch.manual_seed(0)
    model = Stack([Layer(), Layer()])
    program = trace(model, ids(1, 4))
    batch = ids(b, s)
    torch.testing.assert_close(program.run(batch, dict(model.named_parameters())), model(**batch))


def test_pinned_dims_are_reported() -> None:
    class Looped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.lin(row).mean() for row in x]).mean()

    program = trace(Looped(), {"x": torch.randn(4, 6)})
    assert list(program.symbols) == []
    assert program.report == ["The batch size (b) is fixed to 4: the model computes with its value, not only with its shape."]
    with pytest.raises(HgcError, match="dim 0"):
        program.run({"x": torch.randn(3, 6)}, dict(Looped().named_parameters()))


def test_len_of_a_tensor_pins_nothing() -> None:
    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            scores = self.lin(x) @ x.t()
            return F.cross_entropy(scores, torch.arange(len(scores)))

    program = trace(Contrast(), {"x": torch.randn(4, 6)})
    assert [str(symbol) for symbol in program.symbols] == ["b"]


def test_branches_on_sizes_follow_the_example() -> None:
    def halves(x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] % 2 == 0 else x * 3

    model = Step(halves)
    state = dict(model.named_parameters())
    for rows in (4, 5):
        batch = {"x": torch.randn(rows, 6)}
        program = trace(model, batch)
        torch.testing.assert_close(program.run(batch, state), model(**batch))
        assert len(program.assumptions) == 1
        with pytest.raises(HgcError, match="traced for sizes with"):
            program.run({"x": torch.randn(rows + 1, 6)}, state)


def test_ranges_that_tables_imply_are_kept() -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 6))

        def forward(self, ids: Tensor) -> Tensor:
            return (self.table[: ids.shape[1]] * ids[..., None]).mean()

    program = trace(Positions(), ids(3, 32))
    (found,) = (found for symbol, found in program.symbols.items() if str(symbol) == "s")
    assert found.high == 32
    with pytest.raises(HgcError, match="1 to 32"):
        program.run(ids(3, 40), dict(Positions().named_parameters()))


def test_the_user_names_dims() -> None:
    model = Stack([Layer(), Layer()])
    assert [str(s) for s in trace(model, ids(), dynamic={"ids": {1: "length"}}).symbols] == ["length"]
    assert trace(model, ids(), dynamic={}).symbols == {}


@pytest.mark.parametrize(
    ("dynamic", "words"),
    [
        ({"tokens": {0: "b"}}, "names the input 'tokens'"),
        ({"ids": {2: "b"}}, "names dim 2"),
        ({"ids": {0: "b", 1: "b"}}, "different sizes"),
        ({"ids": {0: "a b"}}, "must be an identifier"),
    ],
)
def test_wrong_dims_are_refused(dynamic: dict[str, dict[int, str]], words: str) -> None:
    with pytest.raises(TraceError, match=words):
        trace(Stack([Layer()]), ids(), dynamic=dynamic)

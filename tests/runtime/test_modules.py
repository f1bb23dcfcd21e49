"""Blocks and models: names of the user's model whatever the program calls its parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hgc import runtime as rt
from hgc.errors import ArtifactError, PlanError
from tests.runtime.programs import Model, reference

ODD = ["weight", "0", "12", "007", "class", "parameter", "type", "forward", "__secret", "_x", "reshard", "training", "ﬁ", "a b"]
PART = st.one_of(
    st.sampled_from(ODD),
    st.text(st.characters(exclude_characters="."), min_size=1, max_size=6),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(PART, min_size=1, max_size=3))
def test_access_reaches_any_name(parts: list[str]) -> None:
    name = ".".join(parts)
    text = rt.access(name)
    source = f"class Emitted(rt.Block):\n    def found(self):\n        return self{text}\n"
    scope: dict[str, object] = {"rt": rt}
    exec(source, scope)
    emitted = scope["Emitted"]()  # type: ignore[operator]
    emitted.parameter(name, (2, 3))
    assert emitted.found() is dict(_all(emitted))[name]


def _all(block: rt.Block) -> list[tuple[str, torch.Tensor]]:
    return [(name, holder._parameters[leaf]) for name in block._hgc_declared for holder, leaf in [block.holder(name)]]  # type: ignore[misc]


def test_access_is_readable() -> None:
    assert rt.access("self_attn.q_proj.weight") == ".self_attn.q_proj.weight"
    assert rt.access("mlp.0.weight") == ".mlp[0].weight"
    assert rt.access("class.weight") == "['class'].weight"


def test_names_are_those_of_the_user() -> None:
    model, original = Model(), reference()
    assert set(dict(model.named_parameters())) == set(dict(original.named_parameters())) | {"head.weight"}  # not tied yet
    model.tie({"head.weight": "embed.weight"})
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in model.named_parameters(remove_duplicate=True)]
    assert set(dict(model.named_parameters())) == set(dict(original.named_parameters()))
    assert set(model.state_dict()) == set(original.state_dict())
    assert {name for name, _ in model.named_buffers()} == {name for name, _ in original.named_buffers()}
    for name, parameter in model.named_parameters():
        assert parameter.is_meta
        assert parameter.shape == original.get_parameter(name).shape


def test_state_that_does_not_fit_is_refused() -> None:
    state = Model().state_dict()
    with pytest.raises(ArtifactError, match="unknown"):
        Model().load_state_dict({**state, "extra": torch.ones(1)})
    with pytest.raises(ArtifactError, match="missing"):
        Model().load_state_dict({})


class _Twice(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("w", (4,))
        self.parameter("w", (4,))


class _Other(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("w", (5,))


class _One(rt.Block):
    def __init__(self) -> None:
        super().__init__()
        self.parameter("w", (4,))


class _Disagreeing(rt.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _One(), _Other()


def test_contradictions_are_refused() -> None:
    with pytest.raises(PlanError, match="declares 'w' twice"):
        _Twice()
    with pytest.raises(PlanError, match="declared in two ways"):
        _Disagreeing().declarations()
    with pytest.raises(PlanError, match="not a placement"):
        _One().parameter("v", (4,), tp="nowhere")
    with pytest.raises(PlanError, match="shard one of its dims"):
        _One().parameter("v", (4,), tp="S(1)")
    with pytest.raises(PlanError, match="no size may shrink"):
        _One().parameter("v", (4,), pad_to=(3,))
    with pytest.raises(PlanError, match="zero=4"):
        rt.PlanInfo({"dp": 2}, {}, zero=4)
    with pytest.raises(PlanError, match="data axis 'tp'"):
        rt.PlanInfo({"dp": 2}, {}, data_axes=("tp",))

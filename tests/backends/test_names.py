"""No text can become anything but the identifier, string or comment that it is meant to be."""

import ast
import keyword

from hypothesis import given
from hypothesis import strategies as st

from hgc.backends.torchrun.names import MODULE_NAMES, Scope, comment, identifier, quote

ANY = st.text(max_size=60) | st.sampled_from(
    ["class", "None", "F", "self", "__import__('os')", '"""', "a\nb", "a.b", "0", "é", "match", "print"]
)


@given(ANY)
def test_identifiers_are_free_to_use(text: str) -> None:
    name = identifier(text)
    assert name.isascii()
    assert name.isidentifier()
    assert not keyword.iskeyword(name)
    assert name not in MODULE_NAMES
    assert not name.startswith("_")


@given(st.lists(ANY, max_size=20))
def test_a_scope_gives_no_name_twice(texts: list[str]) -> None:
    scope = Scope({"x"})
    names = [scope.take(text) for text in texts]
    assert len({*names, "x"}) == len(names) + 1


def test_a_released_name_is_given_again() -> None:
    scope = Scope()
    assert [scope.take("x"), scope.take("x"), scope.take("w1"), scope.take("w1")] == ["x", "x2", "w1", "w1_2"]
    scope.release("x")
    assert scope.take("x") == "x"


@given(ANY)
def test_strings_evaluate_to_themselves(text: str) -> None:
    assert ast.literal_eval(quote(text)) == text


@given(ANY)
def test_comments_stay_one_comment(text: str) -> None:
    source = f'"""{comment(text)}."""\nx = 1  # {comment(text)}\n'
    assert [type(statement) for statement in ast.parse(source).body] == [ast.Expr, ast.Assign]


def test_what_a_person_would_choose() -> None:
    assert [identifier(text) for text in ("q_proj", "class", "0", "layers.3.mlp", "self", "largo-più")] == [
        "q_proj",
        "class_",
        "value_0",
        "layers_3_mlp",
        "self_",
        "largo_pi",
    ]

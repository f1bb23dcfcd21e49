"""Long statements are wrapped like black does."""

from hgc.backends.torchrun.layout import Line, aligned, wrapped


def test_what_fits_stays() -> None:
    assert wrapped("x = f(a, b)", 20) == ["x = f(a, b)"]


def test_arguments_move_to_a_line_of_their_own() -> None:
    assert wrapped("x = function(argument, other)", 25) == ["x = function(", "    argument, other", ")"]


def test_else_one_argument_a_line() -> None:
    assert wrapped('x = function(argument, "a, b", other)', 20) == ["x = function(", "    argument,", '    "a, b",', "    other,", ")"]


def test_parentheses_and_subscripts_get_no_comma() -> None:
    """It would make them tuples."""
    assert wrapped("x = a * (b + long_name_of_something)", 20) == ["x = a * (", "    b + long_name_of_something", ")"]
    assert wrapped("x = table[long_name_of_something]", 20) == ["x = table[", "    long_name_of_something", "]"]


def test_nested_brackets() -> None:
    assert wrapped("x = f(g(a, b), h(c, d, e, f))", 16) == [
        "x = f(",
        "    g(a, b),",
        "    h(",
        "        c,",
        "        d,",
        "        e,",
        "        f,",
        "    ),",
        ")",
    ]


def test_comments_stand_in_a_column() -> None:
    assert aligned([Line("a = 1", "[B]"), Line("# mlp"), Line("abc = 2", "[S]")], 100) == ["a = 1    # [B]", "# mlp", "abc = 2  # [S]"]


def test_a_comment_that_does_not_fit_goes_behind_the_bracket() -> None:
    assert aligned([Line("x = function(argument)", "[B, S, 256]")], 30) == ["x = function(", "    argument", ")  # [B, S, 256]"]

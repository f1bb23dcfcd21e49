"""Costs as expressions in parallel degrees, from the expressions at several degrees."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from hgc.errors import HgcError
from hgc.ir.value import Size


def in_degree(found: Mapping[int, Size], degree: sympy.Symbol) -> Size:
    """The one expression ``whole + split / degree`` that every ``degree -> expression`` fits, exactly.

    A rank's part of anything that an axis splits is ``1 / degree`` of it, what it does not split stays whole, and a ring's ``n - 1`` of
    ``n`` parts are a difference of the two; so two degrees determine the expression, and every further one proves it. Several axes:
    first one, then the results in the other. Raises ``HgcError`` with fewer than three degrees, and where the program changes with the
    degree in another way (a padded vocabulary, repeated key-value heads): keep a table there.
    """
    if len(found) < 3:
        raise HgcError(f"an expression in {degree} needs costs at three degrees or more and got {len(found)}; lower the program for more")
    terms = {size: sympy.expand(expression).as_coefficients_dict() for size, expression in found.items()}
    result: Size = sympy.Integer(0)
    for term in dict.fromkeys(term for each in terms.values() for term in each):
        result += term * _coefficient({size: each.get(term, sympy.Integer(0)) for size, each in terms.items()}, degree, term)
    return sympy.expand(result)


def _coefficient(values: Mapping[int, Size], degree: sympy.Symbol, term: Size) -> Size:
    (first, a), (second, b), *others = values.items()
    split = (a - b) / (sympy.Rational(1, first) - sympy.Rational(1, second))
    whole = a - split / first
    for size, value in others:
        if sympy.simplify(whole + split / size - value) != 0:
            shown = ", ".join(f"{value} at {size}" for size, value in values.items())
            raise HgcError(f"the coefficient of {term} is no sum of a part and a share of {degree} ({shown}); use a table of degrees")
    return whole + split / degree

"""Costs as expressions in parallel degrees, from the expressions at several degrees."""

from __future__ import annotations

from collections.abc import Mapping

import sympy

from hgc.errors import HgcError
from hgc.ir.value import Size

_BASIS = 3
"""Powers of the degree that a coefficient is made of: -1, 0 and 1."""


def in_degree(found: Mapping[int, Size], degree: sympy.Symbol) -> Size:
    """The one expression ``whole + split / degree + each * degree`` that every ``degree -> expression`` fits, exactly.

    A rank's part of anything that an axis splits is ``1 / degree`` of it, what it does not split stays whole, a ring's ``n - 1`` of ``n``
    parts are a difference of the two, and one number from each rank (statistics of a split softmax) grows with the degree. Three
    degrees determine the expression, and every further one proves it. Several axes: first one, then the results in the other.

    Raises ``HgcError`` with fewer than four degrees, and where the program changes with the degree in another way (a padded vocabulary,
    repeated key-value heads): keep a table there.
    """
    if len(found) <= _BASIS:
        raise HgcError(
            f"an expression in {degree} needs costs at {_BASIS + 1} degrees or more and got {len(found)}; lower the program for more"
        )
    terms = {size: sympy.expand(expression).as_coefficients_dict() for size, expression in found.items()}
    result: Size = sympy.Integer(0)
    for term in dict.fromkeys(term for each in terms.values() for term in each):
        result += term * _coefficient({size: each.get(term, sympy.Integer(0)) for size, each in terms.items()}, degree, term)
    return sympy.expand(result)


def _coefficient(values: Mapping[int, Size], degree: sympy.Symbol, term: Size) -> Size:
    known = list(values.items())
    rows = sympy.Matrix([[sympy.Rational(1, size), 1, size] for size, _ in known[:_BASIS]])
    split, whole, each = rows.solve(sympy.Matrix([value for _, value in known[:_BASIS]]))
    for size, value in known[_BASIS:]:
        if sympy.simplify(split / size + whole + each * size - value) != 0:
            shown = ", ".join(f"{value} at {size}" for size, value in known)
            raise HgcError(f"the coefficient of {term} is no simple function of {degree} ({shown}); use a table of degrees")
    return split / degree + whole + each * degree

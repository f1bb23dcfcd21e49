"""The operator rule table. Importing this package registers every rule."""

from hgc.ir.rules import attention, collectives, experts, indexing, lookup, losses, matmul, pointwise, reduction, shape
from hgc.ir.rules.core import PARTIAL, WHOLE, Call, Case, Operand, cases, make_call, named_arguments, registered, rule, rule_for

__all__ = [
    "PARTIAL",
    "WHOLE",
    "Call",
    "Case",
    "Operand",
    "attention",
    "cases",
    "collectives",
    "experts",
    "indexing",
    "lookup",
    "losses",
    "make_call",
    "matmul",
    "named_arguments",
    "pointwise",
    "reduction",
    "registered",
    "rule",
    "rule_for",
    "shape",
]

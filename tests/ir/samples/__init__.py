"""Sample calls of every operator that has a rule: small, drawn by hypothesis, in float64."""

from tests.ir.samples import collectives, lookups, pointwise, products, reductions, shapes
from tests.ir.samples.registry import SAMPLES, Draw, Maker, sample

__all__ = ["SAMPLES", "Draw", "Maker", "collectives", "lookups", "pointwise", "products", "reductions", "sample", "shapes"]

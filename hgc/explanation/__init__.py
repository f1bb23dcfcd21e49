"""Why a plan is as it is: simulations of it, and searches around it; see docs/design/explain.md."""

from hgc.explanation.explain import explain
from hgc.explanation.explanation import Explanation
from hgc.explanation.result import Alternative, Setting

__all__ = ["Alternative", "Explanation", "Setting", "explain"]

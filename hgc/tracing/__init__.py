"""Model -> Program: capture, normalise, split into blocks."""

from hgc.tracing.copying import empty_weights
from hgc.tracing.trace import trace

__all__ = ["empty_weights", "trace"]

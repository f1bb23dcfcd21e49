"""Proof that an emitted program equals the model it was made from."""

from hgc.backends.parity.compare import Report
from hgc.backends.parity.verify import verify

__all__ = ["Report", "verify"]

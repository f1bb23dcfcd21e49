"""Proof that an emitted program equals the model it was made from."""

from hgc.backends.parity.compare import Report
from hgc.backends.parity.reference import FILE, make, pack
from hgc.backends.parity.verify import verify

__all__ = ["FILE", "Report", "make", "pack", "verify"]

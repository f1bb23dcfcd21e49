"""Seconds and bytes as people read them."""

from __future__ import annotations


def seconds(amount: float) -> str:
    """``1.25 s``, ``3.1 ms``, ``17 us``."""
    if amount >= 1000:
        return f"{amount:.0f} s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount / 1e-6:.3g} us"


def size(amount: float) -> str:
    """``3.5 GiB``."""
    if amount >= 1000 * 2**30:
        return f"{amount / 2**30:.0f} GiB"
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= scale:
            return f"{amount / scale:.3g} {unit}"
    return f"{amount:.0f} B"

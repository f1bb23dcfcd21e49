"""The torchrun backend: a lowered program becomes one readable file that every rank runs."""

from hgc.backends.torchrun.emit import emit

__all__ = ["emit"]

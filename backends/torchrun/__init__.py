"""The torchrun backend: a lowered program becomes one readable file that every rank runs."""

from hgc.backends.torchrun.emit import emit
from hgc.backends.torchrun.folder import check_target, load_model, staged, write

__all__ = ["check_target", "emit", "load_model", "staged", "write"]

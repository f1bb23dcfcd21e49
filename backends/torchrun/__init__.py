"""The torchrun backend: a lowered program becomes one readable file that every rank runs."""

from hgc.backends.torchrun.emit import emit
from hgc.backends.torchrun.folder import check_target, is_edited, notes, read_manifest, staged, write
from hgc.backends.torchrun.load import load_model
from hgc.backends.torchrun.playable import check_playable

__all__ = ["check_playable", "check_target", "emit", "is_edited", "load_model", "notes", "read_manifest", "staged", "write"]

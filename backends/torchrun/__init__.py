"""The torchrun backend: a lowered program becomes one readable file that every rank runs."""

from hgc.backends.torchrun.emit import emit
from hgc.backends.torchrun.folder import CLUSTER, Pipeline, check_target, is_edited, notes, read_manifest, staged, write
from hgc.backends.torchrun.launch import local_command
from hgc.backends.torchrun.load import load_model
from hgc.backends.torchrun.playable import check_playable
from hgc.backends.torchrun.stages import emit_stages

__all__ = [
    "CLUSTER",
    "Pipeline",
    "check_playable",
    "check_target",
    "emit",
    "emit_stages",
    "is_edited",
    "load_model",
    "local_command",
    "notes",
    "read_manifest",
    "staged",
    "write",
]

"""What an emitted program imports: its classes, its groups, its training loop. See docs/design/runtime.md."""

from hgc.ir import ops
from hgc.plan import Precision
from hgc.runtime.batches import Batch, BatchError, DataRequest, LocalBatch
from hgc.runtime.cli import main
from hgc.runtime.mesh import Mesh, pick_device, start
from hgc.runtime.modules import Block, Blocks, Container, Model, access, block, blocks, stage
from hgc.runtime.pipeline import PipelineTrainer, make_trainer
from hgc.runtime.pipeline_info import Passed, PipelineInfo, Stage
from hgc.runtime.plan_info import Input, Normal, PlanInfo, Symbol
from hgc.runtime.recompute import recompute
from hgc.runtime.tracing import traced
from hgc.runtime.trainer import Trainer

__all__ = [
    "Batch",
    "BatchError",
    "Block",
    "Blocks",
    "Container",
    "DataRequest",
    "Input",
    "LocalBatch",
    "Mesh",
    "Model",
    "Normal",
    "Passed",
    "PipelineInfo",
    "PipelineTrainer",
    "PlanInfo",
    "Precision",
    "Stage",
    "Symbol",
    "Trainer",
    "access",
    "block",
    "blocks",
    "main",
    "make_trainer",
    "ops",
    "pick_device",
    "recompute",
    "stage",
    "start",
    "traced",
]

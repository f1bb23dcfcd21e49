"""hgc: a compiler for distributed training. ``hgc.compile(model, example_inputs, cluster=hgc.Cluster.local(4))``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hgc.backends.parity.verify import verify as verify
    from hgc.cluster import Cluster
    from hgc.compiler import Executable, compile, default_pipeline, distribute
    from hgc.errors import HgcError
    from hgc.ir.program import Program
    from hgc.ir.verifier import verify as verify_program
    from hgc.passes.base import Analysis, Pipeline, Planner, Transform
    from hgc.plan import Plan
    from hgc.strategy import Strategy
    from hgc.tracing.copying import empty_weights as empty_weights
    from hgc.tracing.trace import trace as trace

_HOME = {
    "Analysis": "hgc.passes.base",
    "Cluster": "hgc.cluster",
    "Executable": "hgc.compiler",
    "HgcError": "hgc.errors",
    "Pipeline": "hgc.passes.base",
    "Plan": "hgc.plan",
    "Planner": "hgc.passes.base",
    "Program": "hgc.ir.program",
    "Strategy": "hgc.strategy",
    "Transform": "hgc.passes.base",
    "compile": "hgc.compiler",
    "default_pipeline": "hgc.compiler",
    "distribute": "hgc.compiler",
    "empty_weights": "hgc.tracing",
    "trace": "hgc.tracing",
    "verify": "hgc.backends.parity.verify",
    "verify_program": "hgc.ir.verifier",
}


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that the command line and emitted programs start quickly."""
    if name not in _HOME:
        raise AttributeError(f"module 'hgc' has no attribute {name!r}")
    module = importlib.import_module(_HOME[name])
    return getattr(module, "verify" if name == "verify_program" else name)


__all__ = [
    "Analysis",
    "Cluster",
    "Executable",
    "HgcError",
    "Pipeline",
    "Plan",
    "Planner",
    "Program",
    "Strategy",
    "Transform",
    "compile",
    "default_pipeline",
    "distribute",
    "empty_weights",
    "trace",
    "verify",
    "verify_program",
]

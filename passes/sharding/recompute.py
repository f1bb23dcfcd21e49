"""Recomputation: which blocks, or which operators inside them, run again in backward instead of keeping what they save."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import fx

from hgc.ir import ops
from hgc.ir.printing import operator_label
from hgc.ir.program import Program
from hgc.ir.value import info, set_info
from hgc.passes.base import Transform
from hgc.plan import Plan


@dataclass(frozen=True)
class Recompute(Transform):
    """Mark (``Info.recompute``) the calls of blocks that repeat (``full``), or the attention operators inside them (``selective``).

    Blocks outside the repeated ones (embedding, loss) keep what they save. Runs behind the passes that shard, which copy bodies.
    """

    name: ClassVar[str] = "recompute"

    def applies(self, plan: Plan) -> bool:
        return plan.strategy.recompute != "none"

    def run(self, program: Program, plan: Plan) -> Program:
        kind = plan.strategy.recompute
        blocks = [block for block in program.blocks() if block.repeats]
        if kind != "none" and not blocks:
            program.report.append(f"recompute {kind}: no block of the program repeats, so nothing is recomputed")
        if kind == "full":
            for block in blocks:
                _mark(block.node)
        elif kind == "selective":
            for name in dict.fromkeys(block.body for block in blocks):
                _mark_attention(program, name)
        return program


def _communicates(attention: fx.Node) -> bool:
    return any(attention.kwargs.get(name) is not None for name in ("exchange_axis", "ring_axis"))


def _mark(node: fx.Node) -> None:
    set_info(node, replace(info(node), recompute=True))


def _mark_attention(program: Program, body: str) -> None:
    nodes = list(program.body(body).graph.nodes)
    cores = [node for node in nodes if node.target is ops.attention]
    for node in cores:
        if not _communicates(node):
            _mark(node)
    if any(map(_communicates, cores)):
        sent = "sends keys and values to other ranks, which it should not do twice"
        program.report.append(f"recompute selective: attention of {body} {sent}, so it keeps what it saves; use recompute full")
    elif not cores:
        softmax = any("softmax" in operator_label(node) for node in nodes if node.op == "call_function")
        found = "writes its attention out in operators of its own" if softmax else "has no attention"
        program.report.append(f"recompute selective: {body} {found}, so it keeps all that it saves; use recompute full")

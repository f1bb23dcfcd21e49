"""The steps of a body in the order in which a device takes them: an operator each, or a fused chain of operators."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import sympy

from hgc.cost.execution import Execution
from hgc.cost.kernels import NO_KERNELS, Kernels
from hgc.cost.symbolic import BodyCost, Communication, NodeCost
from hgc.ir.value import Size


@dataclass(frozen=True)
class Work:
    """One step: kernels and collectives of ``nodes`` forward and backward. ``keeps``: does its backward need anything?
    ``regathered``: what is gathered again before its backward."""

    nodes: tuple[str, ...]
    forward: Kernels = NO_KERNELS
    backward_input: Kernels = NO_KERNELS
    backward_weight: Kernels = NO_KERNELS
    communication: tuple[Communication, ...] = ()
    keeps: bool = False
    regathered: tuple[Communication, ...] = ()


def eager_work(body: BodyCost) -> tuple[Work, ...]:
    """Operators one after the other; those that run nothing are left out."""
    sums = _gradient_sums(body)
    found = (of_node(node, sums.get(node.name, ())) for node in body.nodes)
    return tuple(work for work in found if not is_idle(work))


def of_node(node: NodeCost, summed: tuple[Size, ...] = ()) -> Work:
    """``summed``: bytes of results whose gradients arrive from several users and are added up, each time in one kernel."""
    backward = node.backward_input
    if summed:
        backward = replace(backward, moved_bytes=backward.moved_bytes + 3 * sympy.Add(*summed), moves=backward.moves + len(summed))
    return Work((node.name,), node.forward, backward, node.backward_weight, node.communication, bool(node.needs))


def without_copies(work: Work) -> Work:
    """A step that only communicates, without the copies around its collectives."""
    if not work.communication or any(kernels.computes for kernels in (work.forward, work.backward_input, work.backward_weight)):
        return work
    return replace(work, forward=NO_KERNELS, backward_input=NO_KERNELS, backward_weight=NO_KERNELS)


def is_idle(work: Work) -> bool:
    """Does nothing run, and nothing that is kept depend on it?"""
    runs = (work.forward, work.backward_input, work.backward_weight)
    return not work.communication and not work.keeps and all(kernels == NO_KERNELS for kernels in runs)


def _gradient_sums(body: BodyCost) -> dict[str, tuple[Size, ...]]:
    """For each operator the bytes of its results, once for each user beyond the first."""
    users = Counter(found.name for node in body.nodes for found in node.inputs if found.has_gradient)
    users.update(output.name for output in body.outputs)
    makers = {found.name: (node.name, found) for node in body.nodes for found in node.results if found.has_gradient}
    sums: dict[str, tuple[Size, ...]] = {}
    for name, (maker, found) in makers.items():
        sums[maker] = sums.get(maker, ()) + (found.bytes,) * max(users[name] - 1, 0)
    return sums


def gathers(body: BodyCost) -> dict[str, NodeCost]:
    """Memory that a gather makes and a product needs in backward -> the gather."""
    found = {node.results[0].memory: node for node in body.nodes if _is_gather(node)}
    needed = {need.memory for node in body.nodes if node.forward.products for need in node.needs}
    return {memory: node for memory, node in found.items() if memory in needed}


def _is_gather(node: NodeCost) -> bool:
    forward = [each.collective for each in node.communication if not each.backward]
    return forward == ["all_gather"] and len(node.results) == 1


def regathering(body: BodyCost, work: tuple[Work, ...]) -> tuple[Work, ...]:
    """Steps whose gathers run again in backward, in front of the first step there that needs their results."""
    needs = {node.name: {need.memory for need in node.needs} for node in body.nodes}
    found = list(work)
    for memory, gather in gathers(body).items():
        last = max(index for index, each in enumerate(found) if any(memory in needs[name] for name in each.nodes))
        again = tuple(replace(each, backward=True) for each in gather.communication if not each.backward)
        found[last] = replace(found[last], regathered=found[last].regathered + again)
    return tuple(found)


def run_again(body: BodyCost, work: tuple[Work, ...], recompute: str, execution: Execution) -> tuple[Work, ...]:
    """What backward runs again: everything (up to the last step that keeps something), the core of attention, or nothing."""
    if recompute == "full":
        last = (
            max((index for index, each in enumerate(work) if each.keeps), default=-1) if execution.recompute_stops_early else len(work) - 1
        )
        return work[: last + 1]
    if recompute == "selective":
        core = attention_core(body, execution.recompute_written_attention)
        return tuple(each for each in work if set(each.nodes) <= core)
    return ()


def attention_core(body: BodyCost, written_out: bool) -> frozenset[str]:
    """Fused attention; ``written_out``: also operators from the first product of two activations to the last one."""
    if not written_out:
        return frozenset(node.name for node in body.nodes if node.forward.attentions)
    mixing = {n.name for n in body.nodes if n.forward.attentions or any(not product.linear for product in n.forward.products)}
    after = _reached(body.nodes, mixing)
    before = _reaching(body.nodes, mixing)
    return frozenset(after & before)


def _reached(nodes: tuple[NodeCost, ...], start: set[str]) -> set[str]:
    """``start`` and everything computed from it without another projection in between."""
    found: set[str] = set()
    memories: set[str] = set()
    for node in nodes:
        if node.name in start or (not _is_projection(node) and any(i.memory in memories for i in node.inputs)):
            found.add(node.name)
            memories |= {result.memory for result in node.results}
    return found


def _reaching(nodes: tuple[NodeCost, ...], start: set[str]) -> set[str]:
    """``start`` and everything that it is computed from without another projection in between."""
    found: set[str] = set()
    memories: set[str] = set()
    for node in reversed(nodes):
        if node.name in start or (not _is_projection(node) and any(result.memory in memories for result in node.results)):
            found.add(node.name)
            memories |= {i.memory for i in node.inputs}
    return found


def _is_projection(node: NodeCost) -> bool:
    return bool(node.communication) or any(product.linear for product in node.forward.products)

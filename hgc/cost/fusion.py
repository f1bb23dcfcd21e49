"""Chains of regular operators as one kernel each way, and the least that such chains keep for backward.

A chain is a connected set of regular operators with the same number of other operators (products, attention, collectives, lookups)
before them on the longest path, so that chains never wait for one another in a circle. Forward, it reads what enters and writes
what leaves or is kept; backward, it reads the gradients of what leaves and what it rebuilds its values from, and writes the gradients
of what entered. What is kept is the cheapest set of values from which everything that backward needs can be computed again
through regular operators (a minimum cut, as the partitioner of ``torch.compile`` chooses it); masks of random numbers are always kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import sympy

from hgc.cost.kernels import NO_KERNELS, ZERO, Kernels
from hgc.cost.min_cut import cheapest_separation
from hgc.cost.symbolic import BodyCost, NodeCost, Result
from hgc.cost.work import Work, gathers, is_idle, of_node
from hgc.ir.input_sizes import evaluate
from hgc.ir.value import Size

RANDOM = frozenset({"dropout", "native_dropout", "bernoulli", "rand_like", "randn_like"})
"""Operators that give something else when they run again."""


def fused_work(body: BodyCost) -> tuple[Work, ...]:
    """Steps of the body: other operators alone, each chain as one; ordered by what they wait for."""
    levels, flow, kept = _levels(body), _Flow.of(body), fused_kept(body)
    found = [(levels[node.name], 0, n, of_node(node)) for n, node in enumerate(body.nodes) if not node.regular]
    found += [(levels[chain[0].name], 1, n, _chain_work(chain, flow, kept)) for n, chain in enumerate(chains(body))]
    return tuple(work for *_, work in sorted(found, key=lambda entry: entry[:3]) if not is_idle(work))


def fused_kept(body: BodyCost, regathers: bool = False) -> dict[str, Size]:
    """Memory, by name, that backward needs where chains are fused, and its bytes; body inputs too.

    ``regathers``: what was gathered for a product is gathered again, from its kept parts.
    """
    bytes_ = _memory_bytes(body)
    again = gathers(body) if regathers else {}
    needs = [(node, need.memory) for node in body.nodes for need in node.needs]
    forced = {memory for node, memory in needs if not node.regular or (_is_random(node) and _inside(memory))} - again.keys()
    forced |= {found.memory for gather in again.values() for found in gather.inputs}
    state = {found.memory for found, is_state in zip(body.inputs, body.state, strict=True) if is_state}
    sources = {found.memory for found in body.inputs} | forced
    edges: list[tuple[str, str]] = []
    for node in body.nodes:
        entering, made = {found.memory for found in node.inputs}, _made(node)
        if node.regular and entering:
            edges += [(tail, head) for tail in entering for head in made]
        else:
            sources |= made
    needed = {memory for node, memory in needs if node.regular}
    free = forced | state
    price = {name: 0.0 if name in free else float(evaluate(sympy.sympify(size), body.hints)) for name, size in bytes_.items()}
    chosen = cheapest_separation(price, edges, sources, needed)
    return {name: bytes_[name] for name in sorted(forced | chosen)}


def chains(body: BodyCost) -> list[list[NodeCost]]:
    """Connected regular operators of one level, in order of their first operators."""
    levels = _levels(body)
    nodes = {node.name: node for node in body.nodes}
    first: dict[str, str] = {}
    for node in (node for node in body.nodes if node.regular):
        first[node.name] = node.name
        for found in node.inputs:
            maker = maker_of(found.name)
            if maker in first and levels[maker] == levels[node.name] and first[maker] != first[node.name]:
                old, new = first[node.name], first[maker]
                first = {name: new if chain == old else chain for name, chain in first.items()}
    grouped: dict[str, list[NodeCost]] = defaultdict(list)
    for name, chain in first.items():
        grouped[chain].append(nodes[name])
    return list(grouped.values())


def maker_of(value: str) -> str:
    """The operator (or body input) that a value belongs to."""
    return value.partition(".")[0]


def _levels(body: BodyCost) -> dict[str, int]:
    levels: dict[str, int] = {}
    state = {found.memory for found, is_state in zip(body.inputs, body.state, strict=True) if is_state}
    for node in body.nodes:
        before = max((levels.get(maker_of(found.name), 0) for found in node.inputs), default=0)
        # a parameter whose gradient is summed by a collective: nothing runs forward, and nothing waits backward
        leaf = node.forward == NO_KERNELS and all(found.memory in state for found in node.inputs)
        levels[node.name] = before + (not node.regular and not leaf)
    return levels


def _memory_bytes(body: BodyCost) -> dict[str, Size]:
    found = {each.memory: each.bytes for each in body.inputs}
    for node in body.nodes:
        for need in node.needs:
            found.setdefault(need.memory, need.bytes)
        for result in node.results:
            found.setdefault(result.memory, result.bytes)
    return found


def _made(node: NodeCost) -> set[str]:
    """Memory that is new with this operator."""
    results = {found.memory for found in node.results} | {need.memory for need in node.needs if _inside(need.memory, node.name)}
    return results - {found.memory for found in node.inputs}


def _inside(memory: str, node: str = "") -> bool:
    """Memory that no value of the graph has: what an operator keeps of its own."""
    return memory.startswith(f"{node}:") if node else ":" in memory


def _is_random(node: NodeCost) -> bool:
    return node.operator.partition(".")[0] in RANDOM


@dataclass(frozen=True)
class _Flow:
    """Who makes each memory, who uses each value, and what leaves the body."""

    bytes: Mapping[str, Size]
    makers: Mapping[str, NodeCost]
    users: Mapping[str, tuple[str, ...]]
    outputs: tuple[str, ...]
    state: frozenset[str]

    @staticmethod
    def of(body: BodyCost) -> _Flow:
        users: dict[str, tuple[str, ...]] = defaultdict(tuple)
        makers: dict[str, NodeCost] = {}
        for node in body.nodes:
            makers.update(dict.fromkeys(_made(node), node))
            for found in node.inputs:
                users[found.name] += (node.name,)
        state = frozenset(found.memory for found, is_state in zip(body.inputs, body.state, strict=True) if is_state)
        return _Flow(_memory_bytes(body), makers, users, tuple(output.name for output in body.outputs), state)

    def leaving(self, value: str, inside: set[str]) -> int:
        """How often a value is used outside of these operators."""
        return sum(user not in inside for user in self.users.get(value, ())) + self.outputs.count(value)


def _chain_work(members: list[NodeCost], flow: _Flow, kept: Mapping[str, Size]) -> Work:
    names = tuple(node.name for node in members)
    keeps = any(node.needs for node in members)
    if not any(node.forward.moves or node.backward_input.moves or node.backward_weight.moves for node in members):
        return Work(names, keeps=keeps)
    inside = set(names)
    entering = {found.name: found for node in members for found in node.inputs if maker_of(found.name) not in inside}
    leaving = {found.name: found for node in members for found in node.results if flow.leaving(found.name, inside)}
    made = {memory for node in members for memory in _made(node)}
    written = {memory for memory in made if memory in kept} | ({found.memory for found in leaving.values()} & made)
    forward = _read(entering.values(), flow) + sympy.Add(*(flow.bytes[memory] for memory in sorted(written)))
    gradients = sympy.Add(*(found.bytes * flow.leaving(found.name, inside) for found in leaving.values() if found.has_gradient))
    if gradients == ZERO:
        return Work(names, Kernels(moved_bytes=forward, moves=1), keeps=keeps)
    rebuilt = sympy.Add(*(flow.bytes[memory] for memory in sorted(_rebuilt_from(members, flow, kept))))
    passed = sympy.Add(*(found.bytes for found in entering.values() if found.has_gradient))
    backward = Kernels(moved_bytes=gradients + rebuilt + passed, moves=1)
    of_weights = all(found.memory in flow.state for found in entering.values() if found.has_gradient)
    return Work(
        names,
        Kernels(moved_bytes=forward, moves=1),
        NO_KERNELS if of_weights else backward,
        backward if of_weights else NO_KERNELS,
        keeps=keeps,
    )


def _read(entering: Iterable[Result], flow: _Flow) -> Size:
    """Each memory once; of one that is larger than what enters of it, that much."""
    parts: dict[str, list[Size]] = defaultdict(list)
    for found in entering:
        parts[found.memory].append(found.bytes)
    return sympy.Add(*(sizes[0] if len(sizes) == 1 else flow.bytes[memory] for memory, sizes in parts.items()))


def _rebuilt_from(members: Iterable[NodeCost], flow: _Flow, kept: Mapping[str, Size]) -> set[str]:
    """Kept memory that the backward of a chain reads to have all that its operators need."""
    found: set[str] = set()
    seen: set[str] = set()
    waiting = [need.memory for node in members for need in node.needs]
    while waiting:
        memory = waiting.pop()
        if memory in seen:
            continue
        seen.add(memory)
        if memory in kept or memory not in flow.makers:
            found.add(memory)
        else:
            waiting += [each.memory for each in flow.makers[memory].inputs]
    return found

"""Prove rules on a sample: shard the inputs, run the operator on every rank, join, and compare with the unsharded operator.

Ranks are threads; one world runs all cases of a sample. Everything is float64, so that only wrong rules make differences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx

from hgc.backends.parity.threads import mesh_groups, run_ranks
from hgc.errors import ShardingError
from hgc.ir import ops
from hgc.ir.derive import derive, found_placements
from hgc.ir.ops.layout import Order, Zigzag, check_divides, join, take
from hgc.ir.placement import Invariant, Partial, Placement, Replicated, Shard, is_whole, zigzag, zigzag_runs
from hgc.ir.rules import Case, cases, make_call, named_arguments
from hgc.ir.rules.collectives import COLLECTIVES, transition
from hgc.ir.sizes import rebuild_sizes
from hgc.ir.value import Info, Value, info, set_info

Layout: TypeAlias = tuple[Placement, ...]
"""One placement for each axis of the mesh, major first."""
Mesh: TypeAlias = Mapping[str, int]


@dataclass(frozen=True)
class Sample:
    """One call of an operator: tensors stand where its operands stand, the same tensor twice is the same value twice.

    ``symbols`` replaces sizes by expressions, as tracing does for batch and sequence; ``hints`` gives their symbols numbers.
    ``found`` are strided shards to try beside those that the harness tries by itself. ``carriers`` are further inputs of the block,
    that carry symbols.
    """

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    symbols: Mapping[int, sympy.Expr] = field(default_factory=dict)
    hints: Mapping[sympy.Symbol, int] = field(default_factory=dict)
    found: tuple[Shard, ...] = ()
    carriers: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class Single:
    """A sample on one device: its node, operands by name, results with autograd history, and operands after the call."""

    sample: Sample
    node: fx.Node
    operands: Mapping[str, Tensor]
    outputs: tuple[Tensor, ...]
    after: Mapping[str, Tensor]


@dataclass(frozen=True)
class Proof:
    """A case to prove: the node as it runs on a rank, and where its operands (by name) and outputs live on each axis."""

    node: fx.Node
    inputs: Mapping[str, Layout]
    outputs: tuple[Layout, ...]

    def __str__(self) -> str:
        def text(layouts: Sequence[Layout]) -> str:
            return ", ".join("x".join(map(str, layout)) for layout in layouts)

        target = getattr(self.node.target, "__name__", str(self.node.target))
        return f"{target}({text(list(self.inputs.values()))}) -> {text(self.outputs)}"


# -- the sample as a node -------------------------------------------------------------------------------------------------------------


def single_device(sample: Sample) -> Single:
    """The call as a node with what tracing would know about it, and its result on one device."""
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    operands: dict[str, Tensor] = {}

    def convert(argument: Any) -> Any:
        if isinstance(argument, list):
            return [convert(a) for a in argument]
        if not isinstance(argument, Tensor):
            return argument
        if id(argument) not in nodes:
            node = nodes[id(argument)] = graph.placeholder(f"x{len(nodes)}")
            operands[node.name] = argument
            set_info(node, Info(_value(argument, sample), role="input"))
        return nodes[id(argument)]

    for carrier in sample.carriers:
        convert(carrier)
    args = tuple(convert(a) for a in sample.args)
    node = graph.call_function(sample.target, args, {name: convert(a) for name, a in sample.kwargs.items()})
    after = {name: _leaf(t) for name, t in operands.items()}
    outputs, several = _call(node, after)
    known = tuple(_value(output, sample) for output in outputs)
    set_info(node, Info(known if several else known[0]))
    return Single(sample, node, operands, outputs, after)


def _leaf(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _value(tensor: Tensor, sample: Sample) -> Value:
    shape = tuple(sympy.sympify(sample.symbols.get(size, size)) for size in tensor.shape)
    return Value(shape, tensor.dtype, tensor.requires_grad)


def _call(node: fx.Node, operands: Mapping[str, Tensor]) -> tuple[tuple[Tensor, ...], bool]:
    """Run the graph up to ``node`` (a rewrite may put several nodes there); True if it returns several tensors."""
    values: dict[fx.Node, Any] = {}
    for step in node.graph.nodes:
        if step.op == "placeholder":
            values[step] = operands[step.name]
        elif step.op == "call_function":
            args, kwargs = fx.map_arg((step.args, step.kwargs), values.__getitem__)
            values[step] = step.target(*args, **kwargs)
        if step is node:
            break
    result = values[node]
    return (tuple(result), True) if isinstance(result, list | tuple) else ((result,), False)


# -- tensors on a mesh ----------------------------------------------------------------------------------------------------------------


def spread(x: Tensor, layout: Layout, mesh: Sequence[int], hints: Mapping[sympy.Symbol, int], seed: int = 0) -> list[Tensor]:
    """What each rank holds, ranks in order, major axis first."""
    if not mesh:
        return [x]
    parts = _spread(x, layout[0], mesh[0], hints, seed)
    return [local for i, part in enumerate(parts) for local in spread(part, layout[1:], mesh[1:], hints, 97 * seed + i + 1)]


def _spread(x: Tensor, placement: Placement, ranks: int, hints: Mapping[sympy.Symbol, int], seed: int) -> list[Tensor]:
    if isinstance(placement, Shard):
        return [take(x, placement.dim, rank, ranks, parts_of(placement, hints)).contiguous() for rank in range(ranks)]
    if isinstance(placement, Partial):
        generator = torch.Generator().manual_seed(seed)
        numbers = [torch.randint(-8, 8, x.shape, generator=generator) for _ in range(ranks - 1)]
        others = [(n / 4).to(x.dtype) if x.dtype.is_floating_point else n.to(x.dtype) for n in numbers]
        return [*others, x - sum(others, torch.zeros_like(x))]
    return [x] * ranks


def joined(locals_: Sequence[Tensor], layout: Layout, mesh: Sequence[int], hints: Mapping[sympy.Symbol, int], what: str) -> Tensor:
    """Inverse of :func:`spread`; ``AssertionError`` if whole values differ between ranks."""
    if not mesh:
        return locals_[0]
    inner = len(locals_) // mesh[0]
    parts = [joined(locals_[i * inner : (i + 1) * inner], layout[1:], mesh[1:], hints, what) for i in range(mesh[0])]
    placement = layout[0]
    if isinstance(placement, Shard):
        return join(torch.stack(parts), placement.dim, parts_of(placement, hints))
    if isinstance(placement, Partial):
        return torch.stack(parts).sum(0).to(parts[0].dtype)
    for other in parts[1:]:
        assert_same(other, parts[0], f"{what} on different ranks")
    return parts[0]


def parts_of(shard: Shard, hints: Mapping[sympy.Symbol, int]) -> Order:
    runs = zigzag_runs(shard.parts)
    if runs is not None:
        return Zigzag(int(runs.subs(hints)))
    return int(shard.parts.subs(hints)) if isinstance(shard.parts, sympy.Expr) else shard.parts


def assert_same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{what}: {found.dtype}, expected {expected.dtype}"
    if not torch.allclose(found, expected, rtol=1e-9, atol=1e-9, equal_nan=True):
        raise AssertionError(f"{what}: found {found}, expected {expected}")


def cotangent(placement: Placement) -> Placement:
    """Where the gradient lives, as a value: sums and equal copies change places."""
    if isinstance(placement, Partial):
        return Invariant()
    return Partial() if isinstance(placement, Replicated) else placement


# -- cases ----------------------------------------------------------------------------------------------------------------------------


def proofs(single: Single, mesh: Mesh) -> list[Proof]:
    """Every case on every axis of the mesh, lowered as the transform does: major axis first, rewrites applied."""
    start = Proof(single.node, dict.fromkeys(single.operands, ()), ((),) * len(single.outputs))
    found = [start]
    for axis in mesh:
        found = [further for proof in found for further in _lowered(single, proof, axis, mesh)]
    return [_with_kinds(proof, mesh, single.sample) for proof in found]


def _lowered(single: Single, proof: Proof, axis: str, mesh: Mesh) -> Iterator[Proof]:
    seen: set[tuple[Any, ...]] = set()
    _record(proof, mesh)
    for placed in _finds(single, proof, axis, mesh):
        found = {n: placed[n.name] for n in proof.node.graph.nodes if n.name in placed}
        call = make_call(proof.node, axis, mesh, single.sample.hints, found)
        for case in _cases(proof, axis, mesh, call):
            inputs = {o.node.name: p for o, p in zip(call.operands, case.inputs, strict=True)}
            key = (tuple(inputs.items()), case.outputs, case.rewrite is None)
            if key not in seen:
                seen.add(key)
                yield _apply(proof, case, inputs, axis, mesh)


def _cases(proof: Proof, axis: str, mesh: Mesh, call: Any) -> Iterator[Case]:
    arguments = named_arguments(proof.node)
    if proof.node.target in COLLECTIVES and arguments["axis"] == axis:
        needed, given = transition(proof.node.target, arguments)
        fits = all(
            not isinstance(s, Shard) or not isinstance(s.parts, tuple) or sum(s.parts) == call.operands[0].shape[s.dim]
            for s in (needed, given)
        )
        if fits:  # the parts are those of what the earlier axes leave
            yield Case((needed,), (given,))
    else:
        yield from cases(call)


def _apply(proof: Proof, case: Case, inputs: Mapping[str, Placement], axis: str, mesh: Mesh) -> Proof:
    """The case as the transform leaves it: rewritten, placed, size arguments local."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for old in proof.node.graph.nodes:
        copies[old] = graph.node_copy(old, copies.__getitem__)
        copies[old].meta = dict(old.meta)
    node = copies[proof.node]
    if case.rewrite is not None:
        node = case.rewrite(node, axis, mesh[axis])
    placed = {name: (*layout, inputs.get(name, Invariant())) for name, layout in proof.inputs.items()}
    outputs = tuple((*layout, p) for layout, p in zip(proof.outputs, case.outputs, strict=True))
    lowered = Proof(node, placed, outputs)
    _record(lowered, mesh)
    rebuild_sizes(graph, mesh, axis)
    return lowered


def _finds(single: Single, proof: Proof, axis: str, mesh: Mesh) -> Iterator[dict[str, Placement]]:
    """Where operands may live when the cases are asked for: nothing known, one strided, all of equal size strided alike."""
    yield {}
    local = {n.name: _values(n)[0].local_shape(dict(mesh)) for n in proof.node.graph.nodes if n.op == "placeholder"}
    sizes = {name: [int(s.subs(single.sample.hints)) for s in shape] for name, shape in local.items()}
    for name, shape in sizes.items():
        for shard in _strided(shape, mesh[axis], single.sample):
            yield {name: shard}
            alike = {n: shard for n, s in sizes.items() if shard.dim < len(s) and s[shard.dim] == shape[shard.dim]}
            if len(alike) > 1:
                yield dict(alike)


def _strided(shape: Sequence[int], ranks: int, sample: Sample) -> Iterator[Shard]:
    for dim, length in enumerate(shape):
        own = [s.parts for s in sample.found if s.dim == dim]
        for parts in (2, 3, zigzag(1), zigzag(2), (ranks, length - ranks), (ranks, ranks, length - 2 * ranks), *own):
            number = parts_of(Shard(dim, parts), sample.hints)
            positive = min(number) > 0 if isinstance(number, tuple) else length > 0
            if positive and _divides(length, ranks, dim, number):
                yield Shard(dim, parts)


def _divides(length: int, ranks: int, dim: int, parts: Order) -> bool:
    try:
        check_divides(length, ranks, dim, parts)
    except ShardingError:
        return False
    return True


def _with_kinds(proof: Proof, mesh: Mesh, sample: Sample) -> Proof:
    """Choose the kinds of whole operands as gradients need them, and demand that ``derive`` says the same about the node."""
    own = named_arguments(proof.node)["axis"] if proof.node.target in COLLECTIVES else None
    needs = [v.requires_grad for v in _values(proof.node)]
    inputs = dict(proof.inputs)
    for position, axis in enumerate(mesh):
        partial = any(n and not is_whole(o[position]) for n, o in zip(needs, proof.outputs, strict=True))
        for operand in (n for n in proof.node.all_input_nodes if n.name in inputs):
            layout = list(inputs[operand.name])
            if axis != own and is_whole(layout[position]) and _values(operand)[0].requires_grad:
                layout[position] = Replicated() if partial else Invariant()
            inputs[operand.name] = tuple(layout)
    settled = replace(proof, inputs=inputs)
    _record(settled, mesh)
    for position, axis in enumerate(mesh):
        call = make_call(proof.node, axis, mesh, sample.hints, found_placements(proof.node, axis))
        recorded = tuple(layout[position] for layout in proof.outputs)
        derived = derive(proof.node, call, recorded)
        assert derived == recorded, f"{settled}: the verifier derives {[str(p) for p in derived]} on axis {axis!r}"
    return settled


def _record(proof: Proof, mesh: Mesh) -> None:
    for node in proof.node.graph.nodes:
        if node.op == "placeholder":
            set_info(node, replace(info(node), value=_placed(_values(node)[0], proof.inputs[node.name], mesh)))
    placed = tuple(_placed(v, layout, mesh) for v, layout in zip(_values(proof.node), proof.outputs, strict=True))
    single = isinstance(info(proof.node).value, Value)
    set_info(proof.node, replace(info(proof.node), value=placed[0] if single else placed))


def _placed(value: Value, layout: Layout, mesh: Mesh) -> Value:
    return replace(value, placements=tuple(zip(mesh, layout, strict=False)))


def _values(node: fx.Node) -> tuple[Value, ...]:
    found = info(node).value
    return found if isinstance(found, tuple) else (found,) if found is not None else ()


# -- proof ----------------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What one rank holds afterwards."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor]
    after: Mapping[str, Tensor]


def prove(single: Single, claims: Sequence[Proof], mesh: Mesh) -> None:
    """Run all cases on all ranks, and compare values, gradients and updated operands with the single device."""
    sizes, hints = list(mesh.values()), single.sample.hints
    grads = [_cotangent_of(output, seed) for seed, output in enumerate(single.outputs)]
    expected = _Run(tuple(o.detach() for o in single.outputs), _gradients(single.outputs, single.after, grads), single.after)
    given = [
        (
            {name: spread(single.operands[name].detach(), layout, sizes, hints, 3) for name, layout in claim.inputs.items()},
            [spread(g, tuple(map(cotangent, layout)), sizes, hints, 7) for g, layout in zip(grads, claim.outputs, strict=True)],
        )
        for claim in claims
    ]

    def rank_main(rank: int) -> list[_Run]:
        with ops.use(mesh_groups(mesh)):
            return [_run(single, claim, rank, *tensors) for claim, tensors in zip(claims, given, strict=True)]

    results = run_ranks(math.prod(sizes), rank_main)
    for index, claim in enumerate(claims):
        _compare(claim, [rank[index] for rank in results], expected, sizes, hints)


def _cotangent_of(output: Tensor, seed: int) -> Tensor:
    numbers = torch.randint(-8, 9, output.shape, generator=torch.Generator().manual_seed(seed + 5))
    return (numbers / 4).to(output.dtype) if output.dtype.is_floating_point else numbers.to(output.dtype)


def _gradients(outputs: Sequence[Tensor], operands: Mapping[str, Tensor], grads: Sequence[Tensor]) -> dict[str, Tensor]:
    """Gradients of the operands that want one; zeros where an output does not depend on them."""
    wanted = {name: t for name, t in operands.items() if t.requires_grad}
    roots = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if output.requires_grad]
    if not wanted or not roots:
        return {}
    found = torch.autograd.grad([o for o, _ in roots], list(wanted.values()), [g for _, g in roots], allow_unused=True)
    return {name: torch.zeros_like(t) if g is None else g for (name, t), g in zip(wanted.items(), found, strict=True)}


def _run(single: Single, claim: Proof, rank: int, inputs: Mapping[str, list[Tensor]], grads: Sequence[list[Tensor]]) -> _Run:
    operands = {name: shards[rank].clone().requires_grad_(single.operands[name].requires_grad) for name, shards in inputs.items()}
    try:
        outputs, _ = _call(claim.node, operands)
        gradients = _gradients(outputs, operands, [g[rank] for g in grads])
    except Exception as error:
        error.add_note(f"rank {rank} of {claim}")
        raise
    return _Run(tuple(o.detach() for o in outputs), gradients, {name: t.detach() for name, t in operands.items()})


def _compare(claim: Proof, ranks: Sequence[_Run], expected: _Run, sizes: list[int], hints: Mapping[sympy.Symbol, int]) -> None:
    for position, layout in enumerate(claim.outputs):
        what = f"{claim}: output {position}"
        assert_same(joined([r.outputs[position] for r in ranks], layout, sizes, hints, what), expected.outputs[position], what)
    for name, gradient in expected.gradients.items():
        what = f"{claim}: gradient of {name}"
        layout = tuple(map(cotangent, claim.inputs[name]))
        assert_same(joined([r.gradients[name] for r in ranks], layout, sizes, hints, what), gradient, what)
    for name, tensor in expected.after.items():
        if not tensor.requires_grad:
            what = f"{claim}: {name} after the call"
            assert_same(joined([r.after[name] for r in ranks], claim.inputs[name], sizes, hints, what), tensor, what)

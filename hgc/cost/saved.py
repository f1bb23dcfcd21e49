"""Measure a body: run every node forward and backward on fake tensors of symbolic sizes, and watch what torch does.

Each node runs on its own, on detached operands that need gradients where the program says so. What autograd packs is what it saves, memory
shared by tensors is counted once, products and collectives are counted where they reach a kernel. Nothing is computed and nothing is sent.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from hgc._torch_compat import OpOverload, counted_flops, running_in, storage_key, symbolic_mode, watching_calls
from hgc.cost.fake_sizes import FakeSizes
from hgc.cost.kernels import NO_KERNELS, Kernels, Recorder, recording
from hgc.cost.stand_ins import STAND_INS
from hgc.cost.symbolic import ZERO, BodyCost, Communication, Kept, NodeCost, OutputCost, Result
from hgc.ir import ops
from hgc.ir.hashing import body_hash
from hgc.ir.ops.groups import Group
from hgc.ir.program import Program
from hgc.ir.value import Info, Size, Value, info, is_size

_LOOKUPS = frozenset({"embedding", "vocab_embedding", "index_select", "gather", "take_along_dim", "index"})
"""Operators whose first tensor is a table of which they read as much as they return."""
_IRREGULAR = _LOOKUPS | {
    "scatter",
    "scatter_add",
    "index_put",
    "index_add",
    "sort",
    "argsort",
    "topk",
    "cumsum",
    "moe_dispatch",
    "moe_combine",
}
"""Operators that move rows by number, or look at more than one row: they run alone."""
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


def measure(
    program: Program, name: str, dtypes: Sequence[torch.dtype | None] | None = None, autocast: torch.dtype | None = None
) -> BodyCost:
    """The costs of one call of a body of ``program`` on one rank of its mesh, in its symbols.

    ``dtypes``: of the body's inputs, where they are not those of the trace; ``autocast``: what torch's autocast computes products in.

    A node that cannot run on fake tensors is counted as keeping all its operands and results, without FLOPs; ``BodyCost.notes`` says so.
    Bodies that are alike (in several stages, say) are measured once.
    """
    body, symbols = program.body(name), sorted((str(s), found.meaning, found.hint) for s, found in program.symbols.items())
    names = tuple(node.name for node in body.graph.nodes)
    key = (
        name,
        body_hash(body),
        names,
        tuple(program.mesh.items()),
        tuple(symbols),
        bool(program.assumptions),
        tuple(dtypes or ()),
        autocast,
    )
    if key not in _KNOWN:
        if len(_KNOWN) == _MOST_KNOWN:
            _KNOWN.pop(next(iter(_KNOWN)))
        _KNOWN[key] = _measured(program, name, dtypes, autocast)
    return _KNOWN[key]


_KNOWN: dict[tuple[Any, ...], BodyCost] = {}
_MOST_KNOWN = 256


def _measured(program: Program, name: str, dtypes: Sequence[torch.dtype | None] | None, autocast: torch.dtype | None) -> BodyCost:
    mode = symbolic_mode()
    groups = {axis: Group(axis, size, 0, None) for axis, size in program.mesh.items()}  # type: ignore[arg-type]
    with running_in(mode), ops.use(groups):
        sizes = FakeSizes(mode, program.mesh, program.symbols, as_traced=bool(program.assumptions))
        return _Run(name, sizes, program.mesh, program.hints(), autocast).measure(program.body(name), dtypes)


@dataclass
class _Seen:
    """What was watched while one node ran."""

    forward_flops: Any = 0
    backward_flops: Any = 0
    saved: list[Tensor] = field(default_factory=list)
    communication: list[Communication] = field(default_factory=list)
    written_backward: dict[int, Tensor] = field(default_factory=dict)
    forward: Recorder = field(default_factory=Recorder)
    backward: Recorder = field(default_factory=Recorder)
    input_only: Recorder | None = None


class _Run:
    def __init__(
        self,
        name: str,
        sizes: FakeSizes,
        mesh: Mapping[str, int],
        hints: Mapping[sympy.Symbol, int],
        autocast: torch.dtype | None,
    ) -> None:
        self.name, self.sizes, self.mesh, self.hints, self.autocast = name, sizes, dict(mesh), dict(hints), autocast
        self.values: dict[fx.Node, Any] = {}
        self.owners: dict[int, int] = {}  # storage -> position of the body input that it belongs to
        self.kept: dict[int, Tensor] = {}  # storage -> a tensor that keeps it alive
        self.memory: dict[int, str] = {}  # storage -> name of who made it
        self.weights: set[fx.Node] = set()  # parameters, and what is computed of them alone
        self.notes: list[str] = []

    def measure(self, body: fx.GraphModule, dtypes: Sequence[torch.dtype | None] | None) -> BodyCost:
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        for position, (node, dtype) in enumerate(zip(inputs, dtypes or [None] * len(inputs), strict=True)):
            self.values[node] = self._fake(_value(node), dtype)
            self.owners[storage_key(self.values[node])] = position
            self.memory[storage_key(self.values[node])] = node.name
            if info(node).role == "parameter":
                self.weights.add(node)
        costs = [self._node(node) for node in body.graph.nodes if node.op == "call_function" and not self._trivial(node)]
        (output,) = (n for n in body.graph.nodes if n.op == "output")
        kept_inputs = tuple(sorted(self.owners[key] for key in self.kept if key in self.owners))
        return BodyCost(
            self.name,
            tuple(costs),
            tuple(self._result(node.name, self.values[node]) for node in inputs),
            tuple(info(node).role in ("parameter", "buffer") for node in inputs),
            tuple(self._output(self._called(node), self.values[node]) for node in output.args[0]),
            sympy.Add(*(self._bytes(self.values[n]) for n in inputs if info(n).role == "parameter")),
            sympy.Add(*(self._bytes(self.values[n]) for n in inputs if info(n).role == "buffer")),
            kept_inputs,
            (*self.notes, *self.sizes.notes(self.name)),
            self.hints,
        )

    def _fake(self, value: Value, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty([self.sizes.make(size) for size in value.local_shape(self.mesh)], dtype=dtype or value.dtype)
        return made.requires_grad_(value.requires_grad)

    def _trivial(self, node: fx.Node) -> bool:
        """Sizes and pieces of results: they have values and no costs."""
        if is_size(node):
            target: Any = node.target
            self.values[node] = target(*fx.map_arg(node.args, lambda a: self.values[a]))
        elif node.target is operator.getitem:
            source, index = node.args
            self.values[node] = self.values[source][index]  # type: ignore[index]
            if source in self.weights:
                self.weights.add(node)
        else:
            return False
        return True

    # -- one node -----------------------------------------------------------------------------------------------------------------------

    def _node(self, node: fx.Node) -> NodeCost:
        operands = {n: self._operand(n) for n in node.all_input_nodes if not is_size(n)}
        if operands and all(n in self.weights for n in operands):
            self.weights.add(node)
        try:
            result, seen = self._run(node, operands)
        except Exception as error:
            result, seen = self._unknown(node, operands, error)
        self.values[node] = result
        return self._cost(node, {self._called(n): t for n, t in operands.items()}, _tensors(result), seen)

    def _operand(self, node: fx.Node) -> Any:
        known, wanted = self.values[node], info(node).value
        assert isinstance(known, Tensor)
        assert isinstance(wanted, Value)
        return known.detach().requires_grad_(wanted.requires_grad)

    def _run(self, node: fx.Node, operands: Mapping[fx.Node, Any]) -> tuple[Any, _Seen]:
        seen = _Seen()
        function: Any = STAND_INS.get(node.target, node.target)
        args = fx.map_arg((node.args, node.kwargs), lambda n: operands.get(n, self.values.get(n)))
        with (
            self._casting(),
            self._watching(seen, seen.forward, backward=False),
            torch.autograd.graph.saved_tensors_hooks(_keep_in(seen.saved), _same),
        ):
            result = function(*args[0], **args[1])
        wanted = [t for t in operands.values() if t.requires_grad]
        given = [t for t in _tensors(result) if t.requires_grad and not any(t is operand for operand in wanted)]
        if wanted and given and not _is_elementwise(node):
            gradients = [torch.empty_like(t) for t in given]
            inputs = [t for n, t in operands.items() if t.requires_grad and n not in self.weights]
            mixed = 0 < len(inputs) < len(wanted)
            with self._watching(seen, seen.backward, backward=True):
                torch.autograd.grad(given, wanted, gradients, allow_unused=True)
            if mixed:
                frozen = {n: t.detach() if n in self.weights else t for n, t in operands.items()}
                args = fx.map_arg((node.args, node.kwargs), lambda n: frozen.get(n, self.values.get(n)))
                with self._casting():
                    again = _tensors(function(*args[0], **args[1]))
                seen.input_only = _backward_alone(again, inputs)
        return result, seen

    def _casting(self) -> AbstractContextManager[Any]:
        """What forward runs in; casts of parameters are not shared between operators, as they are not between micro-batches."""
        return nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast, cache_enabled=False)

    @contextmanager
    def _watching(self, seen: _Seen, recorder: Recorder, backward: bool) -> Iterator[None]:
        def report(func: Any, args: Any, kwargs: Any, result: Any) -> None:
            recorder.report(func, args, kwargs, result)
            flops = counted_flops(func, args, kwargs, result)
            if backward:
                seen.backward_flops += flops
                if not recorder.paused:  # what is inside one kernel is never in memory
                    seen.written_backward.update({storage_key(t): t for t in _tensors(result)})
            else:
                seen.forward_flops += flops
            namespace, _, what = func.name().partition("::")
            if namespace == "_c10d_functional" and what in _COLLECTIVES:
                kind = "send" if what == "all_to_all_single" and _goes_to_one(args[2]) else _COLLECTIVES[what]
                seen.communication.append(self._communication(kind, args, result, backward))

        with recording(recorder), watching_calls(report):
            yield

    def _communication(self, collective: str, args: Any, result: Tensor, backward: bool) -> Communication:
        axis = next(a for a in reversed(args) if isinstance(a, str))
        payload = result if collective == "all_gather" else args[0]
        return Communication(collective, axis, self.mesh[axis], self._bytes(payload), backward)

    def _unknown(self, node: fx.Node, operands: Mapping[fx.Node, Any], error: Exception) -> tuple[Any, _Seen]:
        values = info(node).value
        made = [self._fake(v) for v in (values if isinstance(values, tuple) else (values,)) if v is not None]
        reason = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
        self.notes.append(
            f"{_operator_name(node)} ({node.name!r} of {self.name}) cannot run without data ({reason}): it is counted as keeping its "
            f"operands and results, with no FLOPs"
        )
        seen = _Seen(saved=[*operands.values(), *made] if any(t.requires_grad for t in made) else [])
        return (tuple(made) if isinstance(values, tuple) else made[0]), seen

    # -- from tensors to expressions ----------------------------------------------------------------------------------------------------

    def _cost(self, node: fx.Node, named: Mapping[str, Tensor], results: list[Tensor], seen: _Seen) -> NodeCost:
        known: Info = info(node)
        operands = list(named.values())
        shared = {storage_key(t) for t in operands}
        fresh = [t for t in results if storage_key(t) not in shared]
        written = self._sum(fresh)
        known_keys = shared | {storage_key(t) for t in (*fresh, *seen.saved)}
        working = [t for key, t in seen.written_backward.items() if key not in known_keys]
        needed = [t for t in operands if t.requires_grad] if fresh and any(t.requires_grad for t in fresh) else []
        names = self._name_results(node, results)
        backward_read = self._sum([t for t in fresh if t.requires_grad]) + self._sum(_distinct(seen.saved)) if needed else ZERO
        for_input, for_weight = self._backward_kernels(node, seen, backward_read + self._sum(needed) if needed else ZERO)
        forward = seen.forward.kernels(self.sizes.expression, self._is_linear(node))
        return NodeCost(
            name=node.name,
            operator=_operator_name(node),
            path=known.path,
            forward_flops=self.sizes.expression(seen.forward_flops),
            backward_flops=self.sizes.expression(seen.backward_flops),
            read_bytes=self._read(node, operands, written) if fresh else ZERO,
            written_bytes=written,
            backward_read_bytes=backward_read,
            backward_written_bytes=self._sum(needed),
            saved_bytes=self._keep(seen.saved),
            backward_step_bytes=self._step(fresh, needed, working) if needed else ZERO,
            communication=tuple(seen.communication),
            forward=forward,
            backward_input=for_input,
            backward_weight=for_weight,
            inputs=tuple(self._result(*each) for each in named.items()),
            results=tuple(self._result(*each) for each in zip(names, results, strict=True)),
            needs=self._needs(node, seen.saved),
            regular=not forward.computes and not seen.communication and _operator_name(node).partition(".")[0] not in _IRREGULAR,
        )

    def _called(self, node: fx.Node) -> str:
        """A piece of a result is called after what made it, as :meth:`_name_results` does."""
        if node.target is operator.getitem:
            source, index = node.args
            return f"{source}.{index}"
        return node.name

    def _name_results(self, node: fx.Node, results: list[Tensor]) -> list[str]:
        names = [f"{node.name}.{index}" if len(results) > 1 else node.name for index in range(len(results))]
        for name, tensor in zip(names, results, strict=True):
            self.memory.setdefault(storage_key(tensor), name)
        return names

    def _result(self, name: str, tensor: Tensor) -> Result:
        memory = self.memory.setdefault(storage_key(tensor), name)  # a collective's result moves when it is first read
        return Result(name, memory, self._bytes(tensor), tensor.requires_grad)

    def _needs(self, node: fx.Node, saved: Sequence[Tensor]) -> tuple[Kept, ...]:
        found: dict[str, Kept] = {}
        for tensor in saved:
            name = self.memory.setdefault(storage_key(tensor), f"{node.name}:{len(found)}")
            found[name] = Kept(name, self._storage_bytes(tensor))
        return tuple(found.values())

    def _is_linear(self, node: fx.Node) -> bool:
        return node.target is not ops.attention and any(n in self.weights for n in node.all_input_nodes)

    def _backward_kernels(self, node: fx.Node, seen: _Seen, moved: Size) -> tuple[Kernels, Kernels]:
        """Those that make gradients of activations, and of parameters; a node that did not run backward moves its bytes in one kernel."""
        linear, expression = self._is_linear(node), self.sizes.expression
        whole = seen.backward.kernels(expression, linear)
        if _is_elementwise(node) and moved != ZERO:
            whole = Kernels(moved_bytes=moved, moves=1)
        if seen.input_only is not None:
            part = seen.input_only.kernels(expression, linear)
            rest = seen.backward.without(seen.input_only).kernels(expression, linear)
            return part, replace(rest, moved_bytes=whole.moved_bytes - part.moved_bytes, moves=max(whole.moves - part.moves, 0))
        of_inputs = any(_value(n).requires_grad for n in node.all_input_nodes if not is_size(n) and n not in self.weights)
        return (whole, NO_KERNELS) if of_inputs else (NO_KERNELS, whole)

    def _step(self, fresh: list[Tensor], needed: list[Tensor], working: list[Tensor]) -> Size:
        """Gradients of results, and all that backward writes; where it did not run, the gradients of operands."""
        gradients = self._sum([t for t in fresh if t.requires_grad])
        return gradients + (sympy.Add(*map(self._storage_bytes, working)) if working else self._sum(needed))

    def _read(self, node: fx.Node, operands: list[Tensor], written: Size) -> Size:
        if _operator_name(node).partition(".")[0] in _LOOKUPS and operands:
            return written + self._sum(operands[1:])
        return self._sum(operands)

    def _keep(self, saved: Sequence[Tensor]) -> Size:
        """Bytes of the memory that nothing kept so far; memory of body inputs is not the body's."""
        added = ZERO
        for tensor in saved:
            key = storage_key(tensor)
            if key not in self.kept:
                self.kept[key] = tensor
                added += ZERO if key in self.owners else self._storage_bytes(tensor)
        return added

    def _output(self, name: str, tensor: Tensor) -> OutputCost:
        key = storage_key(tensor)
        input_, memory = self.owners.get(key), self.memory[key]
        return OutputCost(self._bytes(tensor), self._storage_bytes(tensor), key in self.kept, input_, name, memory, tensor.dtype)

    def _sum(self, tensors: Sequence[Tensor]) -> Size:
        return sympy.Add(*map(self._bytes, tensors))

    def _bytes(self, tensor: Tensor) -> Size:
        return self.sizes.expression(tensor.numel() * tensor.element_size())

    def _storage_bytes(self, tensor: Tensor) -> Size:
        return self.sizes.expression(tensor.untyped_storage().nbytes())


def _backward_alone(results: list[Tensor], wanted: list[Tensor]) -> Recorder:
    """What the backward of a node runs if only some operands have gradients."""
    recorder = Recorder()
    given = [t for t in results if t.requires_grad]
    gradients = [torch.empty_like(t) for t in given]
    with recording(recorder), watching_calls(recorder.report):
        torch.autograd.grad(given, wanted, gradients, allow_unused=True)
    return recorder


def _goes_to_one(splits: Sequence[Any]) -> bool:
    """Do all rows go to one rank, as in a ring?"""
    return sum(not (isinstance(rows, int) and rows == 0) for rows in splits) == 1


def _keep_in(saved: list[Tensor]) -> Any:
    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    return pack


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _distinct(tensors: Sequence[Tensor]) -> list[Tensor]:
    return list({(storage_key(t), tuple(map(str, t.shape))): t for t in tensors}.values())


def _tensors(result: Any) -> list[Tensor]:
    return [t for t in (result if isinstance(result, list | tuple) else (result,)) if isinstance(t, Tensor)]


def _value(node: fx.Node) -> Value:
    found = info(node).value
    assert isinstance(found, Value)
    return found


def _is_elementwise(node: fx.Node) -> bool:
    """Then backward has neither products nor collectives."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, OpOverload):
        return str(node.target).removeprefix("aten.").removesuffix(".default")
    return getattr(node.target, "__name__", str(node.target))

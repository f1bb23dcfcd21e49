"""The IR: a :class:`Program` is a two-level ``torch.fx`` graph.

Root graph (``program.root``)::

    input_ids = placeholder
    w         = get_attr["state.model.layers.0.mlp.up_proj.weight"]     one node for each parameter or buffer
    out       = call_module["bodies.LlamaDecoderLayer"](x, cos, sin, w, ...)   one node for each block
    x1        = getitem(out, 0)
    output(loss)

A body is an ``fx.GraphModule`` of ATen and ``hgc`` operators whose placeholders are the activations first, then parameters and
buffers, and which returns a tuple. Isomorphic blocks call the same body. Sizes never cross a block border: a body
reads them from its own inputs (``aten.sym_size.int``), so ``Info.size`` nodes exist in bodies only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import fx, nn

from hgc.ir.value import Info, Value, info

STATE = "state."
BODIES = "bodies."
RECEIVED = "received"
"""Role of a pipeline stage's root placeholders that stand for values of earlier stages; their targets are names in ``Program.results``."""


@dataclass(frozen=True)
class SymbolInfo:
    """What a size symbol means: the user's axis name, the range tracing found legal, and the example's size."""

    meaning: str
    low: int
    high: int | None
    hint: int


@dataclass(frozen=True)
class State:
    """A parameter, buffer or constant under its original name.

    ``aliases`` are further names of the same tensor (tied weights). ``data`` is kept for buffers and constants that no
    checkpoint holds (rotary frequencies); it is ``None`` for parameters and for what a state dict provides. ``rows``: the first
    dim of ``value`` is padded, and only so many rows are the model's. ``stages``: the pipeline stages that hold a copy each, if
    several do; a parameter's gradient is the sum over them.
    """

    name: str
    value: Value
    kind: str  # "parameter" | "buffer" | "constant"
    aliases: tuple[str, ...] = ()
    persistent: bool = True
    data: torch.Tensor | None = None
    rows: int | None = None
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """One call of a body: the root node, the body's name, and where the block stood in the user's model."""

    node: fx.Node
    body: str
    path: str

    @property
    def repeats(self) -> bool:
        """Is it one of a row of blocks, such as ``model.layers.3``?"""
        return _NUMBERED.search(self.path) is not None


_NUMBERED = re.compile(r"(^|\.)\d+(\.|$)")


@dataclass
class Program:
    """A traced model with its loss, before or after transforms.

    ``mesh`` lists the mesh axes lowered so far with their sizes, major axis first; ``reference`` is the single-device program
    that the transforms started from, kept for the verifier; ``report`` lists assumptions and fallbacks in plain sentences.
    ``assumptions`` are the relations between symbols that tracing relied on, beyond their ranges. ``results`` is empty for a program
    that computes a loss; for another pipeline stage it names the values it hands on, in the order of the root's outputs.
    """

    root: fx.GraphModule
    symbols: dict[sympy.Symbol, SymbolInfo]
    state: dict[str, State]
    mesh: dict[str, int] = field(default_factory=dict)
    report: list[str] = field(default_factory=list)
    reference: Program | None = None
    name: str = "Model"
    assumptions: tuple[sympy.Basic, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def bodies(self) -> dict[str, fx.GraphModule]:
        """Body name -> graph, in order of first use."""
        return {block.body: self.body(block.body) for block in self.blocks()}

    def body(self, name: str) -> fx.GraphModule:
        found = self.root.get_submodule(BODIES + name)
        assert isinstance(found, fx.GraphModule)
        return found

    def add_body(self, name: str, body: fx.GraphModule) -> None:
        """Add or replace a body."""
        self.root.add_submodule(BODIES + name, body)

    def blocks(self) -> Iterator[Block]:
        """Blocks in execution order."""
        for node in self.root.graph.nodes:
            if node.op == "call_module":
                yield Block(node, str(node.target).removeprefix(BODIES), info(node).path)

    def inputs(self) -> list[fx.Node]:
        return [n for n in self.root.graph.nodes if n.op == "placeholder"]

    def outputs(self) -> tuple[fx.Node, ...]:
        """The nodes whose values leave the root: the loss, or what a pipeline stage hands on (``results`` names them)."""
        (out,) = (n for n in self.root.graph.nodes if n.op == "output")
        return (out.args[0],) if isinstance(out.args[0], fx.Node) else tuple(out.args[0])

    def output(self) -> fx.Node:
        """The node that computes the loss; of a program that has one."""
        (loss,) = self.outputs()
        return loss

    def hints(self) -> dict[sympy.Symbol, int]:
        return {symbol: found.hint for symbol, found in self.symbols.items()}

    def copy(self) -> Program:
        """An independent program; transforms work on a copy and never change their input."""
        root = copy_graph_module(self.root)
        root.add_module("bodies", nn.Module())
        for name, body in self.bodies.items():
            root.add_submodule(BODIES + name, copy_graph_module(body))
        return Program(
            root,
            dict(self.symbols),
            dict(self.state),
            dict(self.mesh),
            list(self.report),
            self.reference,
            self.name,
            self.assumptions,
            self.results,
        )

    def run(self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss, executed node by node: the reference, for tests. ``state`` maps original names (or an alias) to tensors.

        Raises ``HgcError`` for inputs whose sizes the program was not traced for.
        """
        (loss,) = self.run_all(inputs, state)
        return loss

    def run_all(self, inputs: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The same for all values that leave the root: of a pipeline stage what it hands on; received values are inputs."""
        from hgc.ir.input_sizes import input_sizes

        if not self.mesh:
            input_sizes(self, inputs)
        values = dict(state)
        for entry in self.state.values():
            for alias in entry.aliases:
                if alias in values:
                    values.setdefault(entry.name, values[alias])
            if entry.data is not None:
                values.setdefault(entry.name, entry.data)
        with _creating_on(inputs):
            results = _Reference(self.root, values).run(*[inputs[str(n.target)] for n in self.inputs()])
        return (results,) if isinstance(results, torch.Tensor) else tuple(results)

    def __str__(self) -> str:
        from hgc.ir.printing import format_program

        return format_program(self)


@contextmanager
def _creating_on(inputs: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Operators that create tensors name no device: they create where the inputs are."""
    device = next((x.device for x in inputs.values()), torch.device("cpu"))
    if device.type == "cpu":  # the default, and the mode costs time
        yield
    else:
        with device:
            yield


class _Reference(fx.Interpreter):
    def __init__(self, root: fx.GraphModule, state: Mapping[str, torch.Tensor]) -> None:
        super().__init__(root)
        self.state = state

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> torch.Tensor:
        return self.state[str(target).removeprefix(STATE)]


class Root(fx.GraphModule):
    """The root graph is interpreted, never compiled: its targets are the user's names, which need not be Python."""

    def recompile(self) -> fx.graph.PythonCode:
        return fx.Graph().python_code("self")


def copy_graph_module(source: fx.GraphModule) -> fx.GraphModule:
    """Copy graph and node metadata (fx shares ``meta`` dicts on copy), share the attributes."""
    graph = fx.Graph()
    nodes: dict[fx.Node, fx.Node] = {}
    output = graph.graph_copy(source.graph, nodes)
    graph.output(output)
    for old, new in nodes.items():
        new.meta = dict(old.meta)
    kind = Root if isinstance(source, Root) else fx.GraphModule
    return kind(source, graph, class_name=source.__class__.__name__)


def state_module(state: Mapping[str, State]) -> nn.Module:
    """A module tree of meta tensors in which every original name resolves, for the root graph's ``get_attr``."""
    root = nn.Module()
    for entry in state.values():
        holder = root
        *path, leaf = entry.name.split(".")
        for part in path:
            if not isinstance(getattr(holder, part, None), nn.Module):
                holder.add_module(part, nn.Module())
            holder = getattr(holder, part)
        shape = [int(size) for size in entry.value.shape]
        holder.register_buffer(leaf, torch.empty(shape, dtype=entry.value.dtype, device="meta"))
    return root


def new_root(graph: fx.Graph, state: Mapping[str, State], bodies: Mapping[str, fx.GraphModule]) -> fx.GraphModule:
    """Assemble the root module from its graph, the state it reads and the bodies it calls."""
    holder = nn.Module()
    holder.add_module("state", state_module(state))
    bodies_module = nn.Module()
    holder.add_module("bodies", bodies_module)
    for name, body in bodies.items():
        bodies_module.add_module(name, body)
    return Root(holder, graph, class_name="Root")


__all__ = ["Block", "Info", "Program", "State", "SymbolInfo", "copy_graph_module", "new_root"]

"""Which nodes make the masks and biases of attention, across blocks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from hgc.ir import ops
from hgc.ir.program import Block, Program
from hgc.ir.rules import named_arguments
from hgc.ir.value import Value, info, is_size

Name = tuple[str, str]
"""A node by the name of its body (``""`` for the root) and its own."""


def mask_nodes(program: Program) -> frozenset[Name]:
    """Nodes on the way to an attention's ``bias``: back to the inputs of the program, but not into activations.

    An activation is what needs a gradient and depends on the user's data; a table of relative positions is none.
    """
    return _Search(program).run()


class _Search:
    def __init__(self, program: Program) -> None:
        self.blocks = {block.node: block for block in program.blocks()}
        self.program = program
        self.found: dict[Name, None] = {}
        self.from_data: dict[str, frozenset[fx.Node]] = {}

    def run(self) -> frozenset[Name]:
        for block in self.blocks.values():
            for node in self.program.body(block.body).graph.nodes:
                if node.target is ops.attention and isinstance(bias := named_arguments(node)["bias"], fx.Node):
                    self._back(block, bias)
        return frozenset(self.found)

    def _back(self, block: Block, node: fx.Node) -> None:
        """Mark a node of a block's body and what it is made of."""
        if (block.body, node.name) in self.found or is_size(node) or self._is_activation(block, node):
            return
        self.found[block.body, node.name] = None
        if node.op == "placeholder":
            if info(node).role == "input":
                self._outside(block, node)
            return
        for source in node.all_input_nodes:
            self._back(block, source)

    def _is_activation(self, block: Block, node: fx.Node) -> bool:
        value = info(node).value
        needs = any(v.requires_grad for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, Value))
        if not needs or (node.op == "placeholder" and info(node).role != "input"):
            return False
        return node in self._data(block.body)

    def _data(self, body: str) -> frozenset[fx.Node]:
        """Nodes of a body that depend on the values of its activations."""
        if body not in self.from_data:
            graph = self.program.body(body).graph
            marked: set[fx.Node] = set()
            for node in graph.nodes:
                is_input = node.op == "placeholder" and info(node).role == "input" and not self._made_of_sizes(body, node)
                if is_input or any(source in marked for source in node.all_input_nodes if not is_size(source)):
                    marked.add(node)
            self.from_data[body] = frozenset(marked)
        return self.from_data[body]

    def _made_of_sizes(self, body: str, taken: fx.Node) -> bool:
        """Does every caller pass a block result that depends on no data?"""
        return all(self._depends_on_no_data(source) for _, source in self._callers(body, taken))

    def _depends_on_no_data(self, source: fx.Node) -> bool:
        made = _maker(source)
        if made is None:
            return False
        block = self.blocks[made[0]]
        result = _results(self.program, block)[made[1]]
        return result not in self._data(block.body)

    def _callers(self, body: str, taken: fx.Node) -> list[tuple[Block, fx.Node]]:
        """Blocks that call a body, with the root node that they pass for one of its placeholders."""
        placeholders = [n for n in self.program.body(body).graph.nodes if n.op == "placeholder"]
        position = placeholders.index(taken)
        found = [(block, block.node.args[position]) for block in self.blocks.values() if block.body == body]
        return [(block, source) for block, source in found if isinstance(source, fx.Node)]

    def _outside(self, block: Block, taken: fx.Node) -> None:
        for _, source in self._callers(block.body, taken):
            self.found["", source.name] = None
            made = _maker(source)
            if made is not None:
                maker = self.blocks[made[0]]
                self._back(maker, _results(self.program, maker)[made[1]])


def _maker(source: fx.Node) -> tuple[fx.Node, int] | None:
    """The call and the position of a root node that is a block's result."""
    call = source.args[0] if source.args else None
    if isinstance(call, fx.Node) and call.op == "call_module":
        index = source.args[1]
        assert isinstance(index, int)
        return call, index
    return None


def _results(program: Program, block: Block) -> Mapping[int, fx.Node]:
    (output,) = (n for n in program.body(block.body).graph.nodes if n.op == "output")
    results = output.args[0]
    assert isinstance(results, list | tuple)
    return {index: node for index, node in enumerate(results) if isinstance(node, fx.Node)}

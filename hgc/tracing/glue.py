"""What stands between blocks: cut where one tower ends and the next begins, and named after the modules inside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from hgc.ir.value import info
from hgc.tracing.names import class_name
from hgc.tracing.normalise.edit import base

_SUFFIXES = ("_model", "_tower", "_encoder_model")


class GlueNames:
    """Knows where the blocks of a model are; ``classes`` maps module paths to class names."""

    def __init__(self, blocks: Iterable[str], containers: Iterable[str], classes: Mapping[str, str]) -> None:
        self.blocks = set(blocks)
        self.towers = _towers(sorted(set(containers)))
        self.classes = classes

    def pieces(self, nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
        """Cut a run of nodes where it passes from one tower to another; nodes of no tower stay with those before them."""
        pieces: list[list[fx.Node]] = [[]]
        current = ""
        for node in nodes:
            tower = self._tower(node)
            if tower and current and tower != current:
                pieces.append([])
            current = tower or current
            pieces[-1].append(node)
        return pieces

    def name(self, nodes: Sequence[fx.Node], is_first: bool, is_last: bool) -> str:
        """``Embeddings``, ``EncoderNorm``, ``Stem``, ``Head``, or the class of the module that does most of the work."""
        if is_last:
            return "Head"
        towers = Counter(tower for node in nodes if (tower := self._tower(node)))
        prefix = _prefix(towers.most_common(1)[0][0]) if towers else ""
        operators = {base(node) for node in nodes}
        units = self._units(nodes)
        if "aten::embedding" in operators or any("embed" in unit for unit in units if not unit.endswith("rotary_emb")):
            return f"{prefix}Embeddings"
        if is_first:
            return f"{prefix}Stem" if any(name.startswith("aten::conv") for name in operators) else f"{prefix}Inputs"
        if not units:
            return f"{prefix}Glue"
        unit = units.most_common(1)[0][0]
        leaf = unit.rpartition(".")[2]
        return f"{prefix}Norm" if "norm" in leaf or leaf.startswith("ln") else class_name(self.classes.get(unit, leaf))

    def _tower(self, node: fx.Node) -> str:
        path = info(node).path + "."
        return next((tower for tower in self.towers if path.startswith(tower + ".")), "")

    def _units(self, nodes: Sequence[fx.Node]) -> Counter[str]:
        """The largest modules inside that hold no block, with the number of weights and operators that they use."""
        units: Counter[str] = Counter()
        for node in nodes:
            parts = info(node).path.split(".")
            for length in range(1, len(parts) + 1):
                path = ".".join(parts[:length])
                if path and not any(block.startswith(path + ".") for block in self.blocks):
                    units[path] += 1 + 3 * sum(1 for x in node.all_input_nodes if x.op == "placeholder")
                    break
        return units


def _towers(containers: list[str]) -> list[str]:
    """The shortest paths that tell the lists of blocks apart, if they are names and not numbers (stages of one tower)."""
    towers: dict[str, None] = {}
    for container in containers:
        parts = container.split(".")
        for length in range(1, len(parts) + 1):
            path = ".".join(parts[:length])
            if sum(1 for other in containers if (other + ".").startswith(path + ".")) == 1:
                if not parts[length - 1].isdigit():
                    towers[path] = None
                break
    return list(towers) if len(towers) > 1 else []


def _prefix(tower: str) -> str:
    leaf = tower.rpartition(".")[2]
    for suffix in _SUFFIXES:
        leaf = leaf.removesuffix(suffix)
    return class_name(leaf)

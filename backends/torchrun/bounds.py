"""Which integers an input may hold: below the size of every table that it addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from hgc.backends.torchrun.names import words
from hgc.backends.torchrun.naming import stem
from hgc.ir.program import STATE, Program
from hgc.ir.rules.core import named_arguments
from hgc.ir.value import info, value

_PASSING = words(
    """
    reshape view transpose permute expand unsqueeze squeeze flatten contiguous clone detach slice select to pad constant_pad_nd
    masked_fill getitem shard shard_r all_gather all_gather_i all_to_all copy_in roll narrow split chunk
    """
)


def upper_bound(program: Program, source: fx.Node) -> int | None:
    """The smallest table that values of an integer input look up, by following it through blocks; ``None`` if there is none."""
    found: list[int] = []
    pending, seen = [source], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for call in node.users:
            if call.op == "call_module":
                for position, argument in enumerate(call.args):
                    if argument is node:
                        results, bounds = _through(program, call, position)
                        found += bounds
                        pending += [user for user in call.users if user.args[1] in results]
    return min(found, default=None)


def _through(program: Program, call: fx.Node, position: int) -> tuple[set[int], list[int]]:
    """Outputs of a block that hold values of one of its inputs, and the sizes of tables looked up with them."""
    graph = program.body(str(call.target).removeprefix("bodies.")).graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    rows = {p: _rows(program, a) for p, a in zip(placeholders, call.args, strict=True) if isinstance(a, fx.Node)}
    results: set[int] = set()
    bounds: list[int] = []
    pending, seen = [placeholders[position]], set()
    while pending:
        node = pending.pop()
        if node in seen:
            continue
        seen.add(node)
        for user in node.users:
            if user.op == "output":
                listed: Any = user.args[0]
                results |= {i for i, result in enumerate(listed) if result is node}
            elif _passes_on(user, node):
                pending.append(user)
            else:
                bounds += _table(user, node, rows)
    return results, bounds


def _passes_on(user: fx.Node, node: fx.Node) -> bool:
    """Does an operator return values of ``node`` as they are?"""
    if stem(user) == "where":
        return user.args[0] is not node
    return stem(user) in _PASSING and user.all_input_nodes[0] is node


def _rows(program: Program, node: fx.Node) -> int | None:
    """Rows of a table that are the model's, without padding."""
    if node.op != "get_attr" or not value(node).shape:
        return None
    entry = program.state[str(node.target).removeprefix(STATE)]
    return entry.rows if entry.rows is not None else int(entry.value.shape[0])


def _table(user: fx.Node, index: fx.Node, rows: dict[fx.Node, int | None]) -> Iterator[int]:
    """The number of rows that an operator lets ``index`` choose from."""
    kind = stem(user)
    if kind not in (
        "embedding",
        "vocab_embedding",
        "cross_entropy",
        "cross_entropy_loss",
        "nll_loss_nd",
        "one_hot",
        "index_select",
        "gather",
    ):
        return
    given = named_arguments(user)
    if kind in ("embedding", "vocab_embedding") and given.get("indices", given.get("ids")) is index:
        known = rows.get(given["weight"])
        yield from _sizes(known if known is not None else value(given["weight"]).shape[0])
    elif kind in ("cross_entropy", "cross_entropy_loss", "nll_loss_nd") and given["target"] is index:
        logits = given["logits"] if kind == "cross_entropy" else given["self"]
        yield from _sizes(given.get("vocab_size") or value(logits).shape[1])
    elif kind == "one_hot":
        yield from _sizes(given["num_classes"])
    elif kind in ("index_select", "gather") and given["index"] is index:
        yield from _sizes(value(given["self"]).shape[given["dim"]])


def _sizes(size: Any) -> Iterator[int]:
    if isinstance(size, int) and size > 0:
        yield size
    elif getattr(size, "is_Integer", False) and int(size) > 0:
        yield int(size)


def is_integer(node: fx.Node) -> bool:
    found = info(node).value
    return not isinstance(found, tuple) and found is not None and not found.dtype.is_floating_point and not found.dtype.is_complex

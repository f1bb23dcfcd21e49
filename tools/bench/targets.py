"""What a benchmark is held to: a figure beside its limit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.table import Table

Target = dict[str, Any]
"""``name``, ``value``, ``limit``, ``holds``, as JSON has them."""


def target(name: str, value: float | None, limit: float, *, at_least: bool = False) -> Target:
    """``limit``: what the value may be at most, or must be ``at_least``. One that was not measured (``None``) does not hold."""
    holds = value is not None and (value >= limit if at_least else value <= limit)
    return {"name": name, "value": value, "limit": limit, "holds": holds}


def target_table(title: str, targets: Iterable[Target]) -> Table:
    shown = Table(title=title)
    shown.add_column("what", overflow="fold")
    for column in ("value", "limit", ""):
        shown.add_column(column, justify="right")
    for each in targets:
        shown.add_row(each["name"], f"{each['value']:.4g}", f"{each['limit']:g}", "" if each["holds"] else "missed")
    return shown

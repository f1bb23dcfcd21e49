"""What the command prints while it works: a spinner on a terminal, plain lines elsewhere. ``NO_COLOR`` is honoured by rich."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.table import Table

_WIDTH = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 140
"""A pipe or a log has no width of its own, and rich's 80 columns break tables."""

out = Console(highlight=False, soft_wrap=True, width=_WIDTH)


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Show that ``name`` is under way, then how long it took."""
    start = time.perf_counter()
    if out.is_terminal:
        with out.status(name):
            yield
    else:
        yield
    out.print(f"{name:<28} {time.perf_counter() - start:6.1f} s", style="dim", markup=False)


def say(text: str, style: str = "") -> None:
    """Print as it stands: brackets in names are no markup."""
    out.print(text, style=style or None, markup=False)


def heading(text: str) -> None:
    out.print(f"\n{text}", style="bold", markup=False)


def table(content: Table) -> None:
    out.print(content)

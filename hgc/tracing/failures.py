"""Failures of capture in one sentence: the operation, the user's source line, and what to do."""

from __future__ import annotations

import contextlib
import io
import linecache
import logging
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from hgc.errors import TraceError

_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parent), "/contextlib.py", "/functools.py")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Run export silently (it prints whole graphs on failure) and raise ``TraceError`` in place of whatever it raises."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except TraceError:
        raise
    except Exception as error:
        raise explain(error) from error
    finally:
        logging.disable(disabled)


def explain(error: BaseException) -> TraceError:
    """One sentence for an exception that export raised."""
    cause = _innermost(error)
    for original in (cause, error):
        if isinstance(original, TraceError):
            return original
    what, remedy = _diagnose(cause, error)
    return TraceError(f"The model cannot be traced{_where(cause, error)}: {what}; {remedy}.")


def _innermost(error: BaseException) -> BaseException:
    while (deeper := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = deeper
    return error


def _diagnose(cause: BaseException, error: BaseException) -> tuple[str, str]:
    """What happened, and what helps, by the kind of exception."""
    name, text = type(cause).__name__, f"{cause}\n{error}"
    if "DataDependent" in type(error).__name__ + name or "data-dependent" in text or "data dependent" in text:
        return (
            "its control flow or a shape depends on the values of a tensor",
            "use torch.where, masking or a fixed shape there, or register a replacement with hgc.tracing.adapters.adapter",
        )
    if "Constraint" in text and "violated" in text:
        return f"the dims asked for cannot vary ({_first_line(text)})", "leave them out of dynamic="
    if "numpy" in text.lower():
        return "it leaves torch for numpy", "use torch functions there"
    return f"{name}: {_first_line(str(cause))}", "change that line, or leave the part out of the traced model"


def _first_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return (lines[0][:200] if lines else "no message").rstrip(".;:")


def _where(*errors: BaseException) -> str:
    for error in errors:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OWN) and not f.filename.endswith(_OWN)]
        frames = [f for f in frames if linecache.getline(f.filename, f.lineno or 0)]
        if frames:
            last = frames[-1]
            return f" at {Path(last.filename).name}:{last.lineno} (`{(last.line or '').strip()}`)"
    return ""

"""Frozen dataclasses to JSON and back, with errors a person can act on; files are written whole or not at all."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import tempfile
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from hgc.errors import HgcError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """A dataclass as nested dicts and lists, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def to_text(data: Any) -> str:
    """Indented JSON that ends with a newline; the same data gives the same text."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def decode(cls: type[T], data: Any, where: str, error: type[HgcError]) -> T:
    """Build a dataclass from what JSON holds.

    ``where`` names the place for error messages (``"strategy"``, ``"nodes[0]"``). Raises ``error`` for an unknown or
    missing key, for a value of the wrong type, and for what the dataclass itself refuses.
    """
    values = decode_fields(cls, data, where, error)
    try:
        return cls(**values)
    except HgcError as refused:
        raise error(f"{where}: {refused}" if where else str(refused)) from None


def decode_fields(cls: type[Any], data: Any, where: str, error: type[HgcError]) -> dict[str, Any]:
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if not isinstance(data, Mapping):
        raise error(f"{where or cls.__name__} is {_shown(data)}; expected an object with the keys {', '.join(fields)}")
    check_keys(data, fields, where, error)
    missing = [name for name, field in fields.items() if _is_required(field) and name not in data]
    if missing:
        raise error(f"{where or cls.__name__} lacks {', '.join(map(repr, missing))}; add {'it' if len(missing) == 1 else 'them'}")
    kinds = typing.get_type_hints(cls)
    return {name: _convert(kinds[name], value, f"{where}.{name}".lstrip("."), error) for name, value in data.items()}


def check_keys(data: Mapping[str, Any], allowed: Iterable[str], where: str, error: type[HgcError]) -> None:
    """Raise ``error`` for a key outside ``allowed``, with the nearest one that exists."""
    known = list(allowed)
    for key in data:
        if key not in known:
            place = f" in {where}" if where else ""
            raise error(f"unknown key {key!r}{place}; {suggestion(str(key), known)}")


def suggestion(word: str, known: Iterable[str]) -> str:
    """``did you mean 'tp'?``, or the list of what exists if nothing is near."""
    options = list(known)
    near = difflib.get_close_matches(word, options, n=1, cutoff=0.5) or difflib.get_close_matches(word.lower(), options, n=1, cutoff=0.5)
    if near:
        return f"did you mean {near[0]!r}?"
    return f"expected one of {', '.join(options)}" if len(options) <= 20 else f"none of the {len(options)} known ones is near"


def check_whole(name: str, value: Any, least: int, error: type[HgcError]) -> None:
    """Raise ``error`` unless ``value`` is an ``int`` (not a ``bool``) of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise error(f"{name} is {_shown(value)}; expected a whole number of {least} or more")


def check_positive(name: str, value: Any, error: type[HgcError], *, zero: bool = False) -> None:
    """Raise ``error`` unless ``value`` is a finite number above zero (or zero itself, if ``zero``)."""
    bad = isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value)
    if bad or value < 0 or (value == 0 and not zero):
        raise error(f"{name} is {_shown(value)}; expected a {'number of 0 or more' if zero else 'number above 0'}")


def check_bool(name: str, value: Any, error: type[HgcError]) -> None:
    if not isinstance(value, bool):
        raise error(f"{name} is {_shown(value)}; expected true or false")


def parse_json(text: str, what: str, error: type[HgcError]) -> Any:
    """Parse JSON; duplicate keys, NaN and infinities are refused, since each would be read in silence otherwise."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen = dict(pairs)
        if len(seen) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise error(f"{what} has the key {twice!r} twice; keep one")
        return seen

    def constant(name: str) -> NoReturn:
        raise error(f"{what} holds {name}, which is not a number; replace it")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=constant)
    except json.JSONDecodeError as broken:
        raise error(f"{what} is not valid JSON at line {broken.lineno}, column {broken.colno}: {broken.msg}; mend or rewrite it") from None
    except RecursionError:
        raise error(f"{what} is nested too deeply to be read; rewrite it") from None


def read_text(path: str | Path, what: str, error: type[HgcError]) -> str:
    """The text of a file; ``error`` names the path and ``what`` the file should be."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise error(f"{what} {str(path)!r} does not exist; check the path") from None
    except IsADirectoryError:
        raise error(f"{what} {str(path)!r} is a folder; give the path of the file in it") from None
    except UnicodeDecodeError:
        raise error(f"{what} {str(path)!r} is not text; give a JSON file") from None
    except OSError as failed:
        raise error(f"{what} {str(path)!r} cannot be read: {failed.strerror}") from None


def write_text(path: str | Path, text: str, what: str, error: type[HgcError]) -> None:
    """Write a file whole or not at all: readers see the old file or the new one, whatever interrupts."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.", suffix=".part")
    except OSError as failed:
        raise error(f"{what} {str(path)!r} cannot be written: {failed.strerror}") from None
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as failed:
        Path(temporary).unlink(missing_ok=True)
        raise error(f"{what} {str(path)!r} cannot be written: {failed.strerror}") from None
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _convert(kind: Any, value: Any, where: str, error: type[HgcError]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        (kind,) = (option for option in arguments if option is not types.NoneType)
        return _convert(kind, value, where, error)
    if origin is tuple:
        if not isinstance(value, list):
            raise error(f"{where} is {_shown(value)}; expected a list")
        return tuple(_convert(arguments[0], item, f"{where}[{index}]", error) for index, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return decode(typing.cast(type[Any], kind), value, where, error)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise error(f"{where} is {_shown(value)}; expected {_KINDS[kind]}")
    return value


_KINDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."

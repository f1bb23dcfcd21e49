"""JSON schema of cluster files, derived from the dataclasses that read them; docs/design/cluster.schema.json is its published form."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any

from hgc.cluster import SHARES, VERSION, Cluster, Device, Kernels, Link, Node

PLAIN = {int: "integer", float: "number", str: "string"}
POSITIVE = {"count", "uplinks", "units", "memory_bytes", "ramp_bytes", "cache_bytes_per_s"}
"""Fields that must be above zero, beside all speeds and shares; the others may be zero."""


def schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of what :meth:`Cluster.to_json` writes and :meth:`Cluster.from_json` reads."""
    definitions = {cls.__name__: _object(cls) for cls in (Kernels, Device, Link, Node)}
    root = _object(Cluster)
    root["properties"] = {"version": {"const": VERSION}, **root["properties"]}
    root["required"] = ["version", *root["required"]]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "hgc cluster", **root, "$defs": definitions}


def _object(cls: type[Any]) -> dict[str, Any]:
    kinds = typing.get_type_hints(cls)
    fields = dataclasses.fields(cls)
    return {
        "type": "object",
        "description": (cls.__doc__ or "").split("\n")[0],
        "properties": {field.name: _value(field.name, kinds[field.name]) for field in fields},
        "required": [field.name for field in fields if field.default is dataclasses.MISSING],
        "additionalProperties": False,
    }


def _value(name: str, kind: Any) -> dict[str, Any]:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        (inner,) = (option for option in typing.get_args(kind) if option is not types.NoneType)
        return {"anyOf": [_value(name, inner), {"type": "null"}]}
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": _value(name, typing.get_args(kind)[0]), "minItems": 1}
    if dataclasses.is_dataclass(kind):
        return {"$ref": f"#/$defs/{typing.cast(type[Any], kind).__name__}"}
    return {"type": PLAIN[kind], **_range(name, kind)}


def _range(name: str, kind: Any) -> dict[str, Any]:
    if kind is str:
        return {}
    if name in SHARES:
        return {"exclusiveMinimum": 0, "maximum": 1}
    if name == "wave_sharpness":
        return {"minimum": 0, "maximum": 1}
    if kind is int:
        return {"minimum": 1}
    above_zero = name in POSITIVE or name.endswith(("_per_s", "efficiency"))
    return {"exclusiveMinimum": 0} if above_zero else {"minimum": 0}

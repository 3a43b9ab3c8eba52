"""Tables of options for the pages: a key, what it may be, its default, what it means."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

HEAD = ("Key", "Type: default", "Meaning")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table. A `|` inside a cell is escaped."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def options(
    model: type[BaseModel], *, beyond: type[BaseModel] = BaseModel, like: Mapping[str, type[BaseModel]] | None = None
) -> str:
    """A section's keys as in YAML, with type, default and meaning, without those of `beyond`.

    `like`: sections whose equal keys are only named, not explained again.
    """
    rows = {name: row_of(name, field) for name, field in model.model_fields.items() if name not in beyond.model_fields}
    said = []
    for section, other in (like or {}).items():
        equal = [name for name, row in rows.items() if _row_in(other, name) == row]
        if equal:
            said.append(f"As in `{section}`: {', '.join(rows.pop(name)[0] for name in equal)}.")
    return "\n\n".join([*said, table(HEAD, rows.values())])


def _row_in(model: type[BaseModel], name: str) -> tuple[str, str, str] | None:
    return row_of(name, model.model_fields[name]) if name in model.model_fields else None


def row_of(name: str, field: FieldInfo, key: str = "") -> tuple[str, str, str]:
    """One key's row below `HEAD`."""
    default = default_of(field)
    kind = f"{type_of(field)}: {default}" if default else type_of(field)
    return key or f"`{name.replace('_', '-')}`", kind, " ".join((field.description or "").split())


def type_of(field: FieldInfo) -> str:
    """The type of the field, as text."""
    return _bounded(field.annotation, field.metadata)


def _bounded(annotation: Any, metadata: Iterable[Any]) -> str:
    """`integer ≥1`. A `Field` in an annotation has a list of its own."""
    limits = [limit for one in metadata for limit in (one.metadata if isinstance(one, FieldInfo) else (one,))]
    bounds = [
        f"{sign}{value:.12g}"
        for limit in limits
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (value := getattr(limit, attribute, None)) is not None
    ]
    return " ".join([_annotation(annotation), *bounds])


def _annotation(annotation: Any) -> str:
    names = {int: "integer", float: "number", str: "text", bool: "boolean", Path: "path"}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation(member) for member in typing.get_args(annotation) if member is not type(None))
    if origin is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        return _bounded(inner, metadata)
    if origin in (tuple, list):
        return "list"
    if origin is typing.Literal:
        return "/".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return "mapping" if origin is dict else names[annotation]  # a type without a text fails here, not in a page


def default_of(field: FieldInfo) -> str:
    """As one would write it; empty for none."""
    value = field.get_default(call_default_factory=True)
    if value in (None, ()) or isinstance(value, BaseModel):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"

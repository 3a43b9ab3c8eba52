"""Tables of options for the pages: a key, what it may be, its default, what it means."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A markdown table. A `|` inside a cell is escaped."""
    head = list(head)
    lines = [head, ["---"] * len(head), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def options(model: type[BaseModel], *, beyond: type[BaseModel] = BaseModel) -> str:
    """A section's keys as one writes them in YAML, with type, default and meaning; without those of `beyond`."""
    rows = []
    for name, field in model.model_fields.items():
        if name in beyond.model_fields:
            continue
        rows.append(
            (
                f"`{name.replace('_', '-')}`",
                type_of(field),
                default_of(field),
                " ".join((field.description or "").split()),
            )
        )
    return table(("Key", "Type", "Default", "Meaning"), rows)


def type_of(field: FieldInfo) -> str:
    """The type of the field, as text."""
    return _bounded(field.annotation, field.metadata)


def _bounded(annotation: Any, metadata: Iterable[Any]) -> str:
    """`whole number ≥ 1`. A `Field` in an annotation has a list of its own."""
    limits = [limit for one in metadata for limit in (one.metadata if isinstance(one, FieldInfo) else (one,))]
    bounds = [
        f"{sign} {value:.12g}"
        for limit in limits
        for attribute, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if (value := getattr(limit, attribute, None)) is not None
    ]
    return " ".join([_annotation(annotation), *bounds])


def _annotation(annotation: Any) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path"}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(_annotation(member) for member in typing.get_args(annotation) if member is not type(None))
    if origin is typing.Annotated:
        inner, *metadata = typing.get_args(annotation)
        return _bounded(inner, metadata)
    if origin in (tuple, list):
        return "list"
    if origin is typing.Literal:
        return " or ".join(f"`{value}`" for value in typing.get_args(annotation))
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "mapping"
    return "mapping" if origin is dict else names[annotation]  # a type without a text fails here, not in a page


def default_of(field: FieldInfo) -> str:
    """As one would write it; a dash for none."""
    value = field.get_default(call_default_factory=True)
    if value in (None, ()) or isinstance(value, BaseModel):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"

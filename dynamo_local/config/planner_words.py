"""The planner's options as words: `decode-kv-scale-up-threshold=0.8`, in either spelling of the name."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dynamo_local.config.loading import parse_value
from dynamo_local.config.planner import PlannerConfig, known_names
from dynamo_local.errors import BadInput
from dynamo_local.sdk.checks import listing, nearest


def parse_settings(words: Iterable[str]) -> dict[str, Any]:
    """`KEY=VALUE` each; a later one wins. Raises `BadInput` naming the word. Values are checked where they apply."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        name = key.strip().lstrip("-").replace("-", "_")
        if not equals or not name:
            raise BadInput(f"{word!r} is no KEY=VALUE, such as decode-kv-scale-up-threshold=0.8")
        if name not in known_names():
            known = [field.replace("_", "-") for field in PlannerConfig.model_fields]
            near = nearest(name.replace("_", "-"), known)
            raise BadInput(f"{key!r} is no option of the planner; there are: {listing(known)}{near}")
        found[name] = option_value(name, text.strip())
    return found


def option_value(name: str, text: str) -> Any:
    """The value of one option: text where the option is text, else as on the command line. `none` is none."""
    annotation = PlannerConfig.model_fields[known_names()[name]].annotation
    kinds = typing.get_args(annotation)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    return text if _is_text(annotation) else parse_value(text)


def _is_text(annotation: Any) -> bool:
    """Whether all that may be given are texts: words, names, paths."""
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(value, str) for value in typing.get_args(annotation))
    members = [member for member in typing.get_args(annotation) if member is not type(None)]
    if members:
        return all(_is_text(member) for member in members)
    return annotation in (str, Path)

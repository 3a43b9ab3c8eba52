"""The planner's options as words: `decode-kv-scale-up-threshold=0.8`, in either spelling of the name."""

from __future__ import annotations

import typing
from collections.abc import Iterable
from typing import Any

from dynamo_local.config.overrides import parse_value
from dynamo_local.config.schema import PlannerConfig
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
        if name not in PlannerConfig.model_fields:
            known = [field.replace("_", "-") for field in PlannerConfig.model_fields]
            near = nearest(name.replace("_", "-"), known)
            raise BadInput(f"{key!r} is no option of the planner; there are: {listing(known)}{near}")
        found[name] = option_value(name, text.strip())
    return found


def option_value(name: str, text: str) -> Any:
    """The value of one option: text where the option is text, else as on the command line. `none` is none."""
    kinds = typing.get_args(PlannerConfig.model_fields[name].annotation)
    if type(None) in kinds and text.lower() in ("none", "null"):
        return None
    return text if name in _TEXTS else parse_value(text)


_TEXTS = frozenset({"namespace", "served_model_name", "environment", "backend", "virtual_keys", "log_dir"})

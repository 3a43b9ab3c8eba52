"""Command-line overrides: `--VllmWorker.ServiceArgs.workers=2`, `--VllmWorker.max-model-len 4096`, `--Svc.flag`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from dynamo_local.config.merge import SERVICE_ARGS, deep_merge
from dynamo_local.errors import ConfigError

_NUMBER = re.compile(r"-(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_HOW = "overrides are written --Service.key=value"


def parse_overrides(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Sections, keys as written. A later word wins; mappings merge in depth (lesson 21).

    A value is JSON where it parses as JSON, else text; under `ServiceArgs.envs` it is always text. A value
    that begins with `-` and is no number needs the `=`. Raises `ConfigError` naming the word that is wrong.
    """
    sections: dict[str, Any] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        path, text = _split(word, rest)
        value: Any = (
            True if text is None else text if path[1:3] == [SERVICE_ARGS, "envs"] and path[3:] else parse_value(text)
        )
        if value is True and path[1:3] == [SERVICE_ARGS, "envs"]:
            raise ConfigError(f"{word!r} has no value: write --{'.'.join(path)}=value")
        _check_conflict(sections, path, word)
        sections = deep_merge(sections, _nest(path, value))
    return sections


def _split(word: str, rest: list[str]) -> tuple[list[str], str | None]:
    """The path of one override and the text of its value, taken from the following words where it stands there."""
    if not word.startswith("--"):
        raise ConfigError(f"unexpected word {word!r}: {_HOW}")
    name, equals, text = word[2:].partition("=")
    path = name.split(".")
    if len(path) < 2:
        raise ConfigError(f"unknown option {word!r}: {_HOW}, or see dynamo serve --help")
    if not all(path):
        raise ConfigError(f"{word!r} has an empty part in its name: {_HOW}")
    if path[1:3] == [SERVICE_ARGS, "envs"] and len(path) > 4:
        path = [*path[:3], ".".join(path[3:])]
    if equals:
        return path, text
    if rest and rest[0] == "=":  # `--Svc.key = value`, which Dynamo took
        if len(rest) < 2:
            raise ConfigError(f"{word!r} has no value after '=': {_HOW}")
        del rest[0]
        return path, rest.pop(0)
    if not rest or rest[0].startswith("--"):
        return path, None
    if rest[0].startswith("-") and not _NUMBER.fullmatch(rest[0]):
        raise ConfigError(f"unexpected word {rest[0]!r} after {word!r}: if it is the value, write {word}={rest[0]}")
    return path, rest.pop(0)


def parse_value(text: str) -> Any:
    """JSON; `True`/`FALSE` too, as YAML has them; anything else is text, also what JSON calls NaN or 1e999."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except (ValueError, RecursionError):
        return text


def _refuse(name: str) -> Any:
    raise ValueError(name)


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(text)
    return number


def _nest(path: Sequence[str], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    nested: dict[str, Any] = value
    return nested


def _check_conflict(sections: Mapping[str, Any], path: Sequence[str], word: str) -> None:
    """`--A.b=1 --A.b.c=2`: which of the two is meant cannot be known."""
    at: Any = sections
    for depth, key in enumerate(path):
        if not isinstance(at, Mapping):
            raise ConfigError(f"{word!r} contradicts an earlier --{'.'.join(path[:depth])}, which has a plain value")
        if key not in at:
            return
        at = at[key]

"""Reading the statefile with nothing but `json`: no lock, no validation, no heavy import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dynamo_local.core.types import NAME
from dynamo_local.errors import StateError


class StateMissing(StateError):
    """There is no statefile: nothing runs in the namespace, or it has left."""

    code: ClassVar[str] = "state_missing"


def statefile_path(namespace: str, env: Mapping[str, str]) -> Path:
    """`$DYN_LOCAL_STATE_DIR/<namespace>.json`, by default `~/.dynamo/state/<namespace>.json`."""
    if not NAME.fullmatch(namespace):
        raise StateError(f"namespace {namespace!r}: only letters, digits, '_' and '-' are allowed")
    configured = env.get("DYN_LOCAL_STATE_DIR")
    folder = Path(configured) if configured else Path(env.get("HOME") or Path.home()) / ".dynamo" / "state"
    return folder / f"{namespace}.json"


def read_text(path: Path) -> str:
    """The file's text. Raises `StateMissing`, or `StateError` if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise StateMissing(f"there is no statefile {path}: nothing runs in namespace {path.stem!r}") from None
    except UnicodeDecodeError as error:
        raise StateError(f"{path} is not UTF-8 (byte {error.start})", path=str(path)) from None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error


def parse(path: Path, text: str) -> dict[str, Any]:
    """The text as a JSON object. Raises `StateError` that names the file and the place."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise StateError(f"{path} is not valid JSON: {error.msg} ({where})", path=str(path)) from None
    if not isinstance(value, dict):
        raise StateError(f"{path} holds a {type(value).__name__}, not a JSON object", path=str(path))
    return value


def read_raw(path: Path) -> dict[str, Any]:
    """The file as plain dictionaries, not validated. A file is replaced whole, so this never sees a torn one.

    Raises `StateMissing` or `StateError`.
    """
    return parse(path, read_text(path))

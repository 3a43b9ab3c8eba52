"""Reading the statefile with nothing but `json`: no lock, no validation, no heavy import."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from dynamo_local.core.types import namespace_fault
from dynamo_local.errors import StateError


class StateMissing(StateError):
    """There is no statefile: nothing runs in the namespace, or it has left."""

    code: ClassVar[str] = "state_missing"


def home(env: Mapping[str, str]) -> Path:
    """`$HOME`, else the user's by the password file. Raises `StateError` for a user without any (as in containers)."""
    try:
        return Path(env.get("HOME") or Path.home())
    except (RuntimeError, KeyError):
        raise StateError(
            f"uid {os.getuid()} has no home; set HOME, or DYN_LOCAL_STATE_DIR and DYN_LOCAL_LOG_DIR"
        ) from None


def state_folder(env: Mapping[str, str]) -> Path:
    """`$DYN_LOCAL_STATE_DIR`, by default `~/.dynamo/state`: whole, and with its links followed.

    Two shells that name one folder in two ways then still mean one run.
    """
    configured = env.get("DYN_LOCAL_STATE_DIR")
    folder = Path(configured) if configured else home(env) / ".dynamo" / "state"
    return Path(os.path.realpath(folder))


def statefile_path(namespace: str, env: Mapping[str, str]) -> Path:
    """`NAMESPACE.json` in the `state_folder`. Raises `StateError` for what is no namespace."""
    fault = namespace_fault(namespace)
    if fault is not None:
        raise StateError(fault)
    return state_folder(env) / f"{namespace}.json"


def namespaces(env: Mapping[str, str]) -> list[str]:
    """Those that have a statefile: they run, or a killed arbiter has left them."""
    found = (path.stem for path in state_folder(env).glob("*.json"))
    return sorted(name for name in found if namespace_fault(name) is None)


def make_private(folder: Path) -> None:
    """Make the folder and its parents, 0700 each; `mkdir(parents=True)` would let others list the parents.

    Those that are there keep their mode. Raises `OSError`.
    """
    for each in reversed((folder, *folder.parents)):
        if not each.exists():
            each.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)  # refuses what is no folder


def prepare_folder(folder: Path) -> None:
    """Make the folder of statefiles, 0700. One that is there keeps its mode: others may have a use for it.

    Raises `StateError` if it is a stranger's, or cannot be made.
    """
    try:
        make_private(folder)
        owner = folder.stat().st_uid
    except OSError as error:
        raise StateError(f"{folder} cannot be used for statefiles: {error.strerror}") from error
    if owner != os.geteuid():
        raise StateError(f"{folder} belongs to uid {owner}, not to you; set DYN_LOCAL_STATE_DIR")


def read_text(path: Path) -> str:
    """The file's text. Raises `StateMissing`, or `StateError` if it cannot be read, or is another user's.

    Its contents are acted upon (processes are ended, folders removed). So in a folder where others may write, the
    file's owner matters.
    """
    try:
        with open(path, encoding="utf-8", opener=_open_at_once) as file:
            info = os.fstat(file.fileno())
            if info.st_uid != os.geteuid():
                raise StateError(
                    f"{path} belongs to uid {info.st_uid}, not to you (uid {os.geteuid()}); run this as that user",
                    path=str(path),
                )
            if not stat.S_ISREG(info.st_mode):
                raise StateError(f"{path} is not a plain file; remove it", path=str(path))
            return file.read()
    except FileNotFoundError:
        raise StateMissing(f"there is no statefile {path}: nothing runs in namespace {path.stem!r}") from None
    except UnicodeDecodeError as error:
        raise StateError(f"{path} is not UTF-8 (byte {error.start})", path=str(path)) from None
    except OSError as error:
        raise StateError(f"{path} cannot be read: {error.strerror}", path=str(path)) from error


def _open_at_once(path: str, flags: int) -> int:
    """A named pipe in its place would else be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)


def parse(path: Path, text: str) -> dict[str, Any]:
    """The text as a JSON object. Raises `StateError` that names the file and the place."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno} column {error.colno}"
        raise StateError(f"{path} is not valid JSON: {error.msg} ({where})", path=str(path)) from None
    except RecursionError:
        raise StateError(f"{path} is no statefile: its brackets are nested too deep", path=str(path)) from None
    if not isinstance(value, dict):
        raise StateError(f"{path} holds a {type(value).__name__}, not a JSON object", path=str(path))
    return value


def read_raw(path: Path) -> dict[str, Any]:
    """The file as plain dictionaries, not validated. A file is replaced whole, so this never sees a torn one.

    Raises `StateMissing` or `StateError`.
    """
    return parse(path, read_text(path))

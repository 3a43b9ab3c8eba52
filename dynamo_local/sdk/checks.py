"""Checks that decorators and configuration share: names, resources, environment variables.

Each returns the parsed value or raises `ValueError` with a reason; the caller knows the place and adds it.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from dynamo_local.core.types import NAME, Resources, Role, namespace_fault

RESERVED_SECTIONS = ("Common", "Host")
"""Sections of a configuration that are not services (`Planner` is one where the graph declares it)."""

RESERVED_WATCHERS = ("etcd", "nats", "guardian")
"""Embedded servers are watchers `{namespace}_etcd` and `{namespace}_nats`; so is the guardian."""

SET_BY_SERVE = frozenset(
    {
        "DYN_ARBITER_PID",
        "DYN_LEASE_TTL_S",
        "DYN_NAMESPACE",
        "DYN_NATS_TOKEN_FILE",
        "DYN_RUN_ID",
        "DYN_STATEFILE",
        "DYN_WATCHER_NAME",
        "DYN_WORKER_FOLDER",
        "DYN_WORKER_GPUS",
        "DYNAMO_SERVICE_CONFIG",
    }
)
"""Variables that `dynamo serve` sets for each worker. A service's `envs` with one of them is refused."""

_ROLES_BY_NAME = {"VllmWorker": Role.DECODE, "PrefillWorker": Role.PREFILL, "Frontend": Role.FRONTEND}
_NUMBERED = re.compile(r"_\d+$")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CPU = re.compile(r"\d+(\.\d+)?|\d+m")
_MEMORY = re.compile(r"\d+(\.\d+)?([EPTGMK]i?|k)?B?")
_ENDPOINT = re.compile(r"[A-Za-z0-9_-]+(/[A-Za-z0-9_-]+)*")


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'gpu'?`, or an empty string if nothing is near."""
    known = list(known)
    lowered = {name.lower(): name for name in known}
    if word.lower() in lowered:
        return f"; did you mean {lowered[word.lower()]!r}?"
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


KEYS_SHOWN = 24
"""An unknown key's error lists the known ones, up to so many."""


SERVICE_ARG_KEYS = frozenset(
    (
        "workers",
        "resources",
        "envs",
        "standby",
        "start_deadline_s",
        "drain_deadline_s",
        "colocate",
        "flippable",
        "sharing",
    )
)
"""The fields of `config.schema.ServiceArgs`, which this package may not import; a test compares them."""


def unknown_key(key: str, known: Iterable[str]) -> str:
    """`unknown key 'itll'; did you mean 'itl-ms'?`, as files spell keys. The known keys follow only if none is near."""
    names = sorted({name.replace("_", "-") for name in known})
    said = f"unknown key {key!r}"
    if key.replace("-", "_") in SERVICE_ARG_KEYS:
        return f"{said}; did you mean 'ServiceArgs.{key.replace('_', '-')}'?"
    if near := nearest(key.replace("_", "-"), names):
        return said + near
    if len(names) > KEYS_SHOWN:
        return f"{said}; {len(names)} keys are allowed: `dynamo config schema` lists them"
    return f"{said}; allowed: {', '.join(names) or '(none)'}"


def respelt(text: str, names: Mapping[str, str]) -> str:
    """The text with each of these names as it was written."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def listing(names: Iterable[str]) -> str:
    """`a, b, c` in alphabetical order, `(none)` if empty."""
    return ", ".join(sorted(names)) or "(none)"


def check_service_name(name: Any) -> str:
    """A name that circus, etcd keys and NATS subjects can carry, and that no watcher of ours has."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ValueError(f"{name!r} is not a service name: use letters, digits, '_' and '-'")
    if _NUMBERED.search(name):
        raise ValueError(
            f"service name {name!r} ends in '_<number>', which is how a service's further workers are named; rename it"
        )
    if name in RESERVED_SECTIONS:
        raise ValueError(f"service name {name!r} is a section of the configuration; rename it")
    if name.lower() in RESERVED_WATCHERS:
        whose = "guardian" if name.lower() == "guardian" else "embedded server"
        raise ValueError(f"service name {name!r} is taken by the {whose}; rename it")
    return name


def check_namespace(namespace: Any) -> str:
    """As `namespace_fault` has it; raises `ValueError`."""
    fault = namespace_fault(namespace)
    if fault is not None:
        raise ValueError(fault)
    return str(namespace)


def check_endpoint_name(name: Any) -> str:
    """Parts of letters, digits, `_` and `-`, joined by slashes: `chat/completions`."""
    if not isinstance(name, str) or not _ENDPOINT.fullmatch(name):
        raise ValueError(f"{name!r} is not an endpoint name: use letters, digits, '_' and '-', in parts joined by '/'")
    return name


def parse_role(role: Any, name: str) -> Role:
    """The role given, or the default for the service's name (issue 2, item 2)."""
    if role is None:
        return _ROLES_BY_NAME.get(name, Role.OTHER)
    try:
        return Role(role)
    except ValueError:
        raise ValueError(f"role {role!r} is unknown; one of {listing(Role)}{nearest(str(role), Role)}") from None


def parse_workers(workers: Any, least: int = 1) -> int:
    """A whole number of at least `least`, or its decimal text."""
    if (count := _whole(workers)) is None or count < least:
        raise ValueError(
            f"workers must be a whole number of at least {least}, not {workers!r}; "
            "to leave a service out, do not link it"
        )
    return count


def parse_resources(given: Any, base: Resources | None = None) -> Resources:
    """`{"gpu": 1 | "1", "cpu": "10", "memory": "20Gi"}` over `base`. All optional, all per worker."""
    base = base or Resources()
    if given is None:
        return base
    if not isinstance(given, Mapping):
        raise ValueError(f"resources must be a mapping with gpu, cpu, memory, not {given!r}")
    known = ("gpu", "cpu", "memory")
    for key in given:
        if key not in known:
            raise ValueError(f"resources.{key} is unknown; allowed: {listing(known)}{nearest(str(key), known)}")
    gpu = base.gpu
    if given.get("gpu") is not None:
        whole = _whole(given["gpu"])
        if whole is None or whole < 0:
            raise ValueError(f"resources.gpu must be a whole number of devices per worker, not {given['gpu']!r}")
        gpu = whole
    cpu = _quantity("cpu", given.get("cpu"), _CPU, "10, 0.5 or 500m") or base.cpu
    memory = _quantity("memory", given.get("memory"), _MEMORY, "20Gi") or base.memory
    return Resources(gpu=gpu, cpu=cpu, memory=memory)


def parse_envs(given: Any) -> dict[str, str]:
    """`{"NAME": "value"}`, or Dynamo's `[{"name": "NAME", "value": "value"}]`, to a mapping of strings.

    Whole numbers become text. Booleans and fractions are refused: YAML has read `yes` as True and `1.10` as
    1.1 before we see them, and a worker would get another text than was written.
    """
    if given is None:
        return {}
    if isinstance(given, list | tuple):
        given = _envs_from_list(given)
    if not isinstance(given, Mapping):
        raise ValueError(f"envs must map names to values, not be a {type(given).__name__}")
    envs: dict[str, str] = {}
    for name, value in given.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            raise ValueError(f"envs: {name!r} is not a name of an environment variable")
        if name in SET_BY_SERVE:
            raise ValueError(f"envs.{name} is set by dynamo serve itself; remove it")
        if isinstance(value, bool) or not isinstance(value, str | int):
            raise ValueError(f"envs.{name} must be a string, not a {type(value).__name__}; put it in quotes")
        if "\0" in str(value):
            raise ValueError(f"envs.{name} holds a NUL character")
        envs[name] = str(value)
    return envs


def _envs_from_list(given: Iterable[Any]) -> dict[str, Any]:
    envs: dict[str, Any] = {}
    for item in given:
        if not isinstance(item, Mapping) or set(item) != {"name", "value"}:
            raise ValueError("envs as a list must hold {name, value} mappings")
        if item["name"] in envs:
            raise ValueError(f"envs names {item['name']!r} twice")
        envs[item["name"]] = item["value"]
    return envs


def _whole(value: Any) -> int | None:
    if isinstance(value, str) and re.fullmatch(r"\d{1,9}", value.strip(), re.ASCII):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _quantity(key: str, value: Any, pattern: re.Pattern[str], example: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int | float) or not pattern.fullmatch(str(value)):
        raise ValueError(f"resources.{key} must be a quantity per worker such as {example}, not {value!r}")
    return str(value)


# --- places
# Where in the user's code something was written: `graphs/disagg.py:12`, for errors a person can act on.

_SDK_FOLDER = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file; shown relative to the current folder when it lies below it."""

    file: str
    line: int

    def __str__(self) -> str:
        shown = os.path.relpath(self.file) if Path(self.file).is_relative_to(Path.cwd()) else self.file
        return f"{shown}:{self.line}"


def caller_place() -> Place:
    """The innermost line that is running outside this package: the user's decorator, or `link` call."""
    frame = _caller()
    return Place(frame.f_code.co_filename, frame.f_lineno)


def importing_module() -> str | None:
    """The module whose top level called into this package; None if a function did."""
    frame = _caller()
    return str(frame.f_globals.get("__name__")) if frame.f_code.co_name == "<module>" else None


def _caller() -> FrameType:
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) == _SDK_FOLDER:
        frame = frame.f_back
    return frame


def error_place(error: BaseException, base_dir: Path) -> Place | None:
    """Where an import failed: the innermost line below `base_dir`, else the innermost outside the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return Place(error.filename, error.lineno or 1)
    places = [
        Place(os.path.abspath(frame.filename), frame.lineno or 1)
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and "importlib" not in Path(frame.filename).parts
    ]
    places = [place for place in places if os.path.dirname(place.file) != _SDK_FOLDER]
    own = [place for place in places if Path(place.file).is_relative_to(base_dir)]
    found = own or places
    return found[-1] if found else None

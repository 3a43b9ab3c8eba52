"""From older schemas to the current one, a step at a time. A step takes and returns plain dictionaries.

Version 0 is the predecessor's file (Dynamo 0.1-0.3), which had no `schema_version`. It is read for one purpose:
tools and people that still have one get an answer instead of a stack trace.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dynamo_local.core.secrets import mask_config
from dynamo_local.errors import StateError
from dynamo_local.state.schema import SCHEMA_VERSION

NOBODY = "0" * 26
"""The run id given to a file without one: it sorts before every real one, and no run owns it."""


def migrate(path: Path, raw: Mapping[str, Any]) -> dict[str, Any]:
    """`raw` in the current schema. Raises `StateError` for a version that is unknown or not a number."""
    version = raw.get("schema_version", 0)
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise StateError(f"{path}: schema_version: {version!r} is no version number", path=str(path))
    if version > SCHEMA_VERSION:
        raise StateError(
            f"{path}: schema_version: {version} is newer than {SCHEMA_VERSION}, the newest that this version of "
            "dynamo-local knows; use the version that wrote it",
            path=str(path),
        )
    current = dict(raw)
    while version < SCHEMA_VERSION:
        current = MIGRATIONS[version](path, current)
        version += 1
    return current


def _from_predecessor(path: Path, raw: dict[str, Any]) -> dict[str, Any]:
    components = raw.get("components")
    if not isinstance(components, dict):
        raise StateError(f"{path}: components: missing, so this is no statefile", path=str(path))
    namespace = str(raw.get("namespace") or path.stem)
    environment = raw.get("environment")
    named = environment if isinstance(environment, dict) else {}
    return {
        "schema_version": 1,
        "namespace": namespace,
        "run_id": NOBODY,
        "circus_endpoint": raw.get("circus_endpoint"),
        "components": {name: _old_entry(path, namespace, name, entry) for name, entry in components.items()},
        # Its file held the manager's whole environment, tokens included (lesson 11): keep the two named ones.
        "environment": _old_environment(named),
    }


def _old_entry(path: Path, namespace: str, name: str, entry: Any) -> dict[str, Any]:
    if not isinstance(entry, dict):
        raise StateError(f"{path}: components.{name}: an object is needed", path=str(path))
    resources = entry.get("resources") or {}
    gpus = [str(gpu) for gpu in resources.get("allocated_gpus") or []]
    lease = entry.get("lease")
    migrated = {
        "watcher_name": str(entry.get("watcher_name") or name),
        "component": re.sub(r"_\d+$", "", name.removeprefix(f"{namespace}_")),
        "cwd": str(entry.get("cwd") or ""),
        "cmd": str(entry.get("cmd") or ""),
        "resources": {"allocated_gpus": gpus} if gpus else {},
        "gpus_per_worker": len(gpus),
        # It recorded no state: a worker with a lease was serving.
        "state": "ready" if lease else "exited",
    }
    if lease:
        migrated["lease"] = f"{lease:x}" if isinstance(lease, int) else str(lease)
    return migrated


def _old_environment(environment: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    config = environment.get("DYNAMO_SERVICE_CONFIG")
    if isinstance(config, str):
        try:
            kept["DYNAMO_SERVICE_CONFIG"] = json.dumps(mask_config(json.loads(config)))
        except ValueError:
            kept["DYNAMO_SERVICE_CONFIG"] = "{}"
    resources = environment.get("SYSTEM_RESOURCES")
    if isinstance(resources, dict):
        info = [str(gpu) for gpu in resources.get("gpu_info") or []]
        kept["SYSTEM_RESOURCES"] = {"total_gpus": int(resources.get("total_gpus") or len(info)), "gpu_info": info}
    return kept


MIGRATIONS: Mapping[int, Callable[[Path, dict[str, Any]], dict[str, Any]]] = {0: _from_predecessor}

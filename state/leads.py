"""The leads that were measured on this host, over all runs: one small file in the state folder.

It is locked while it is changed, bounded, and has a version. It is a help and no truth: a broken one is put aside, one
of a newer version is left alone, and whoever cannot write it goes on without.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from dynamo_local.core.lead_times import KEPT
from dynamo_local.errors import StateError
from dynamo_local.state.raw import prepare_folder

VERSION = 1
NAMESPACES_MAX = 64
"""Those whose leads were measured last."""
LOCK_TIMEOUT_S = 5.0
FILE_NAME = ".lead-times"
"""No `.json`: it is no namespace's statefile."""


class LeadFile:
    """The file in `folder`. A component's lead times hold for its engine and model (`of`)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / FILE_NAME

    def read(self, namespace: str, of: Mapping[str, str]) -> dict[str, dict[str, tuple[float, ...]]]:
        """Component -> scaling option -> seconds, of the components in `of` that ran the same then.

        Raises `StateError` if the file cannot be read.
        """
        found = self._load().get(namespace, {}).get("components", {})
        return {
            component: {option: tuple(samples) for option, samples in found[component]["rungs"].items()}
            for component in of
            if component in found and found[component]["of"] == of[component]
        }

    def all(self, namespace: str) -> dict[str, dict[str, tuple[float, ...]]]:
        """Component -> scaling option -> seconds, whatever each ran. Raises `StateError` where it cannot be read."""
        found = self._load().get(namespace, {}).get("components", {})
        return {
            component: {option: tuple(samples) for option, samples in known["rungs"].items()}
            for component, known in found.items()
        }

    def add(self, namespace: str, component: str, of: str, option: str, seconds: float) -> None:
        """One more. Raises `StateError` where it cannot be written. Blocks."""
        try:
            prepare_folder(self.path.parent)
            with FileLock(f"{self.path}.lock", timeout=LOCK_TIMEOUT_S, mode=0o600):
                namespaces = self._load()
                entry = namespaces.pop(namespace, {"components": {}})
                known = entry["components"].get(component)
                if known is None or known["of"] != of:
                    known = entry["components"][component] = {"of": of, "rungs": {}}
                known["rungs"][option] = [*known["rungs"].get(option, []), round(seconds, 4)][-KEPT:]
                namespaces[namespace] = entry  # the last one: the first are forgotten first
                self._write(dict(list(namespaces.items())[-NAMESPACES_MAX:]))
        except (OSError, Timeout) as error:
            raise StateError(f"{self.path}: {error}") from error

    def _load(self) -> dict[str, Any]:
        try:
            raw = json.loads(self.path.read_text())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StateError(f"{self.path}: {error}") from error
        except ValueError as error:
            return self._put_aside(f"it is no JSON: {error}")
        version = raw.get("version") if isinstance(raw, dict) else None
        namespaces: Any = raw.get("namespaces") if isinstance(raw, dict) else None
        if isinstance(version, int) and version > VERSION:
            raise StateError(f"{self.path} is of version {version}, written by a newer dynamo-local: it is left alone")
        if version != VERSION or not _is_sound(namespaces):
            return self._put_aside("it is none of ours")
        return dict(namespaces)

    def _put_aside(self, why: str) -> dict[str, Any]:
        aside = self.path.with_name(f"{FILE_NAME}.corrupt-{int(time.time())}")
        try:
            self.path.replace(aside)
        except OSError as error:
            raise StateError(f"{self.path}: {why}, and it cannot be put aside: {error}") from error
        return {}

    def _write(self, namespaces: Mapping[str, Any]) -> None:
        temporary = self.path.with_name(f"{FILE_NAME}.new")
        with open(temporary, "w", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            json.dump({"version": VERSION, "namespaces": namespaces}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)


def _is_sound(namespaces: Any) -> bool:
    if not isinstance(namespaces, dict):
        return False
    components = [entry.get("components") if isinstance(entry, dict) else None for entry in namespaces.values()]
    known = [each for found in components if isinstance(found, dict) for each in found.values()]
    if not all(isinstance(found, dict) for found in components):
        return False
    return all(
        isinstance(each, dict)
        and isinstance(each.get("of"), str)
        and isinstance(each.get("rungs"), dict)
        and all(_are_seconds(samples) for samples in each["rungs"].values())
        for each in known
    )


def _are_seconds(samples: Any) -> bool:
    return isinstance(samples, Sequence) and all(
        isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < float("inf")
        for value in samples
    )

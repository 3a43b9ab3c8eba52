"""The statefile: what runs, on which GPUs, under which lease, and how to start one more.

Installed as `dynamo_local.state`; the top-level folder is only where the source lies.

A bare `state` package would shadow a user's own module of that name, or be shadowed by that: `dynamo serve` imports
users' code. So importing it by the bare name is refused.

`raw` reads the file with `json` alone, for `dynamo status`, which must be quick. `schema` and `store` bring pydantic
and filelock: they are imported only when one of their names is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_local.state.leads import LeadFile
    from dynamo_local.state.raw import StateMissing, namespaces, prepare_folder, read_raw, state_folder, statefile_path
    from dynamo_local.state.run_id import new_run_id
    from dynamo_local.state.schema import (
        ComponentEntry,
        EntryResources,
        Environment,
        FlipEntry,
        FollowEntry,
        PlannerEntry,
        RestartEntry,
        ServerEntry,
        SpareEntry,
        StandbyEntry,
        State,
        SystemResources,
    )
    from dynamo_local.state.store import Removal, StateStore, load

if not __name__.startswith("dynamo_local."):
    raise ImportError(f"import dynamo_local.{__name__}, not the bare {__name__!r}")


_HOME = {
    "LeadFile": "leads",
    "StateMissing": "raw",
    "namespaces": "raw",
    "prepare_folder": "raw",
    "read_raw": "raw",
    "state_folder": "raw",
    "statefile_path": "raw",
    "new_run_id": "run_id",
    "ComponentEntry": "schema",
    "EntryResources": "schema",
    "FlipEntry": "schema",
    "Environment": "schema",
    "FollowEntry": "schema",
    "PlannerEntry": "schema",
    "RestartEntry": "schema",
    "ServerEntry": "schema",
    "SpareEntry": "schema",
    "StandbyEntry": "schema",
    "State": "schema",
    "SystemResources": "schema",
    "Removal": "store",
    "StateStore": "store",
    "load": "store",
}

__all__ = [
    "ComponentEntry",
    "EntryResources",
    "Environment",
    "FlipEntry",
    "FollowEntry",
    "LeadFile",
    "PlannerEntry",
    "Removal",
    "RestartEntry",
    "ServerEntry",
    "SpareEntry",
    "StandbyEntry",
    "State",
    "StateMissing",
    "StateStore",
    "SystemResources",
    "load",
    "namespaces",
    "new_run_id",
    "prepare_folder",
    "read_raw",
    "state_folder",
    "statefile_path",
]


def __getattr__(name: str) -> Any:
    try:
        module = import_module(f"{__name__}.{_HOME[name]}")
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(module, name)

"""Which module a runtime's driver is in. Imported only where that runtime is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynamo_local.runtimes.launching import DYNAMO_1X, HTTP, NONE

if TYPE_CHECKING:
    from dynamo_local.runtimes.config import CommandConfig
    from dynamo_local.runtimes.runner import CommandWorker

MODULES = {
    DYNAMO_1X: "dynamo_local.runtimes.dynamo_1x",
    HTTP: "dynamo_local.runtimes.http",
    NONE: "dynamo_local.runtimes.none",
}


def _module(runtime: str) -> Any:
    return import_module(MODULES[runtime])


def component_of(runtime: str) -> type[CommandWorker]:
    """The component class of a runtime's workers."""
    component: type[CommandWorker] = _module(runtime).COMPONENT
    return component


def config_of(runtime: str) -> type[CommandConfig]:
    """The model of its section."""
    config: type[CommandConfig] = _module(runtime).CONFIG
    return config

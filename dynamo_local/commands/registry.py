"""Which module a runtime's driver is in. Imported only where that runtime is used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from dynamo_local.commands.launching import DYNAMO_1X, HTTP, NONE

if TYPE_CHECKING:
    from dynamo_local.commands.config import CommandConfig
    from dynamo_local.commands.runner import CommandWorker

MODULES = {
    DYNAMO_1X: "dynamo_local.commands.dynamo_1x.driver",
    HTTP: "dynamo_local.commands.http_server.driver",
    NONE: "dynamo_local.commands.none",
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

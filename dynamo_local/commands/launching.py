"""From a section of the configuration to a `Launch`. Light: nothing but this runs before the command is started.

The section was checked when the graph was planned (`commands.config`), so nothing is checked here again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from dynamo_local.commands import placeholders
from dynamo_local.commands.dynamo_1x import env as dynamo_1x_env
from dynamo_local.commands.ports import Ports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

DYNAMO_1X, HTTP, NONE = "dynamo-1x", "http", "none"

NOT_FOR_COMMANDS = ("DYNAMO_SERVICE_CONFIG", "DYN_NATS_TOKEN_FILE")
"""Variables of the worker that the command does not get: the options of every service, and our own NATS token."""


class Launch:
    """The words of a command with every placeholder filled in, its environment, its ports by name.

    `signs` names the ports on which it listens only when it is almost ready.
    """

    __slots__ = ("argv", "env", "ports", "signs")

    def __init__(
        self, argv: tuple[str, ...], env: Mapping[str, str], ports: Mapping[str, int], signs: tuple[str, ...] = ()
    ) -> None:
        self.argv, self.env, self.ports, self.signs = argv, env, ports, signs


def ports_wanted(runtime: str, section: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of all ports of one worker: those of its command, and those of its runtime."""
    names = placeholders.port_names(placeholders.words_of(section["command"]))
    own = dynamo_1x_env.port_names(section) if runtime == DYNAMO_1X else ()
    return tuple(dict.fromkeys((*names, *own)))


def prepare(section: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Launch, Ports]:
    """The command with its placeholders filled in, its environment, and the ports that it holds.

    Raises `ConfigError` where a port cannot be had, `OSError` where a secret's file cannot be read.
    """
    runtime = str(section.get("runtime", NONE))
    watcher = environ["DYN_WATCHER_NAME"]
    ports = Ports(watcher, ports_wanted(runtime, section), section.get("ports") or {})
    argv = placeholders.fill(
        placeholders.words_of(section["command"]),
        namespace=environ["DYN_NAMESPACE"],
        watcher=watcher,
        model=section.get("model"),
        ports=ports.numbers,
    )
    env = {name: value for name, value in environ.items() if name not in NOT_FOR_COMMANDS}
    env["PATH"] = search_path(environ)
    if runtime == HTTP and environ.get("DYN_STANDBY") == "1" and not section.get("sleep_hook"):
        env["VLLM_SERVER_DEV_MODE"] = "1"  # its sleep endpoints; that it listens on loopback alone was checked
    if runtime != DYNAMO_1X:
        return Launch(argv, env, ports.numbers), ports
    env.update(dynamo_1x_env.environment(ports.numbers, environ))
    return Launch(argv, env, ports.numbers, dynamo_1x_env.signs(section)), ports


def search_path(environ: Mapping[str, str]) -> str:
    """Where programs are looked for: first beside the Python that runs us, so that `python` is that one."""
    return os.pathsep.join([os.path.dirname(sys.executable), environ.get("PATH", os.defpath)])

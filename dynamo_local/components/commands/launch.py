"""From a section of the configuration to a `Launch`. Light: nothing but this runs before the command is started.

The section was checked when the graph was planned (`components.commands.config`), so nothing is checked here again.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from dynamo_local.components.commands import dynamo_1x_env
from dynamo_local.components.commands.ports import Ports

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


# --- The placeholders of a command: `{port:NAME}`, `{namespace}`, `{watcher}` and `{model}`.

_PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*)(?::([^{}\s\"']*))?\}(?!\})")
"""A word in braces. Braces around anything else (JSON, `{{ … }}` of a template) are the command's own."""
_PYTHON = re.compile(r"python[\d.]*")
_PORT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]*")
PLAIN = ("namespace", "watcher", "model")
KNOWN = "{port:NAME}, {namespace}, {watcher}, {model}"


def words_of(command: object) -> tuple[str, ...]:
    """The words of a `command:`, a list or a string as for a shell (which there is not). Raises `ValueError`."""
    if isinstance(command, str):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise ValueError(f"command {command!r} cannot be split into words: {error}") from None
    elif isinstance(command, list | tuple):
        for word in command:
            if isinstance(word, bool) or not isinstance(word, str | int | float):
                raise ValueError(f"command: {word!r} is no word; put it in quotes")
        words = [str(word) for word in command]
    else:
        raise ValueError(f"command must be a string or a list of words, not {command!r}")
    if not words or not words[0].strip():
        raise ValueError("command is empty")
    if any("\0" in word for word in words):
        raise ValueError("command holds a NUL character")
    return tuple(words)


def programs(words: Sequence[str]) -> tuple[str, ...]:
    """The program, and behind `env NAME=value …` also the one that it runs; without those that a placeholder names."""
    named = [words[0]]
    if words[0].rpartition("/")[2] == "env":
        behind = itertools.dropwhile(lambda word: "=" in word, words[1:])
        named += [word for word in itertools.islice(behind, 1) if not word.startswith("-")]
    return tuple(program for program in named if "{" not in program)


def module_of(words: Sequence[str]) -> tuple[str, str] | None:
    """The Python and the package of `PYTHON -m PACKAGE.MODULE …`. None for other words."""
    if len(words) < 3 or not _PYTHON.fullmatch(words[0].rpartition("/")[2]) or words[1] != "-m" or "{" in words[2]:
        return None
    return words[0], words[2].partition(".")[0]


def port_names(words: Sequence[str]) -> tuple[str, ...]:
    """The names in `{port:NAME}`, each once, in their order."""
    found = (match for word in words for match in _PLACEHOLDER.finditer(word))
    return tuple(dict.fromkeys(match[2] for match in found if match[1] == "port" and match[2]))


def named(words: Sequence[str]) -> tuple[str, ...]:
    """Placeholders in the words, and words that look like one: `{model}`."""
    return tuple(match[0] for word in words for match in _PLACEHOLDER.finditer(word))


def check(words: Sequence[str], *, model: str | None) -> None:
    """Raise `ValueError` that names the first placeholder that cannot be filled, and those that can."""
    for word in words:
        for match in _PLACEHOLDER.finditer(word):
            name, port = match[1], match[2]
            if name == "port":
                if port is None or not _PORT_NAME.fullmatch(port):
                    raise ValueError(f"{match[0]} must name its port: {{port:http}}")
            elif name not in PLAIN or port is not None:
                from difflib import get_close_matches  # only needed for an error: a command's start does not pay for it

                near = get_close_matches(name, [*PLAIN, "port"], n=1)
                hint = f"; did you mean {{{near[0]}}}?" if near else ""
                raise ValueError(f"{match[0]} is no placeholder; known: {KNOWN}{hint}")
            elif name == "model" and model is None:
                raise ValueError("{model} is used, but there is no `model:` in the section")


def fill(
    words: Sequence[str], *, namespace: str, watcher: str, model: str | None, ports: Mapping[str, int]
) -> tuple[str, ...]:
    """The words with every placeholder filled in; `check` has passed, and every port has a number."""
    values = {"namespace": namespace, "watcher": watcher, "model": model or ""}

    def value(match: re.Match[str]) -> str:
        return str(ports[match[2]]) if match[1] == "port" else values[match[1]]

    return tuple(_PLACEHOLDER.sub(value, word) for word in words)


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
    names = port_names(words_of(section["command"]))
    own = dynamo_1x_env.port_names(section) if runtime == DYNAMO_1X else ()
    return tuple(dict.fromkeys((*names, *own)))


def prepare(section: Mapping[str, Any], environ: Mapping[str, str]) -> tuple[Launch, Ports]:
    """The command with its placeholders filled in, its environment, and the ports that it holds.

    Raises `ConfigError` where a port cannot be had, `OSError` where a secret's file cannot be read.
    """
    runtime = str(section.get("runtime", NONE))
    watcher = environ["DYN_WATCHER_NAME"]
    ports = Ports(watcher, ports_wanted(runtime, section), section.get("ports") or {})
    argv = fill(
        words_of(section["command"]),
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

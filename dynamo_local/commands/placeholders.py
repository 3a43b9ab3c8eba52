"""`{port:NAME}`, `{namespace}`, `{watcher}` and `{model}` in the words of a command."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence

_PLACEHOLDER = re.compile(r"(?<!\{)\{([A-Za-z_]\w*)(?::([^{}\s\"']*))?\}(?!\})")
"""A word in braces. Braces around anything else (JSON, `{{ … }}` of a template) are the command's own."""
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


def port_names(words: Sequence[str]) -> tuple[str, ...]:
    """The names in `{port:NAME}`, each once, in their order."""
    found = (match for word in words for match in _PLACEHOLDER.finditer(word))
    return tuple(dict.fromkeys(match[2] for match in found if match[1] == "port" and match[2]))


def named(words: Sequence[str]) -> tuple[str, ...]:
    """What in the words is, or looks like, a placeholder: `{model}`."""
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

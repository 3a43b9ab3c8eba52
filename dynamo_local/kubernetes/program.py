"""What the words of a process say about it: its module, its part in a disaggregated graph, its options."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

MODE = "--disaggregation-mode"
OLD_MODES = {"--is-prefill-worker": "prefill", "--is-decode-worker": "decode"}
"""Before 1.1; some versions take both."""
MODELS = ("--model", "--model-path")
WORKERS = ("dynamo.vllm", "dynamo.mocker", "dynamo.sglang", "dynamo.trtllm")
FRONTEND = "dynamo.frontend"
_PYTHON = re.compile(r"(?:.*/)?python(?:3(?:\.\d+)?)?")


def is_python(program: str) -> bool:
    """`python`, `python3`, `/opt/venv/bin/python3.12`."""
    return _PYTHON.fullmatch(program) is not None


def module_of(words: Sequence[str]) -> str | None:
    """`dynamo.vllm` for `python3 -m dynamo.vllm …`; None for another program."""
    if len(words) >= 3 and is_python(words[0]) and words[1] == "-m":
        return words[2]
    return None


def option(words: Sequence[str], *names: str) -> str | None:
    """The value of the last of these options, as one word (`--a=b`) or as two."""
    value = None
    for at, word in enumerate(words):
        name, equals, rest = word.partition("=")
        if name in names:
            value = rest if equals else words[at + 1] if at + 1 < len(words) else None
    return value


def mode_of(words: Sequence[str]) -> str | None:
    """`prefill`, `decode`, `agg`, … as the command says; None where it does not."""
    return option(words, MODE) or next((mode for flag, mode in OLD_MODES.items() if flag in words), None)


def without(words: Sequence[str], *names: str) -> tuple[str, ...]:
    """The words without these options and their values."""
    kept: list[str] = []
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in names:
            skip = True
        elif word.partition("=")[0] not in names:
            kept.append(word)
    return tuple(kept)


def without_env(words: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """`env A=b program …` as the program's words, and the variables that stood before them."""
    if words[0].rpartition("/")[2] != "env":
        return tuple(words), {}
    set_here = tuple(itertools.takewhile(lambda word: "=" in word, words[1:]))
    rest = tuple(words[1 + len(set_here) :])
    if not rest or rest[0].startswith("-"):  # `env -u NAME …`: env's own business
        return tuple(words), {}
    return rest, {name: value for name, _, value in (word.partition("=") for word in set_here)}

"""Commands in the pages exist, and their options are those that the commands take."""

from __future__ import annotations

import contextlib
import re

import click
import pytest
from circus.commands import get_commands

import dynamo_local.circus_plugins.commands  # noqa: F401  registers our commands with circus
from dynamo_local.cli.main import cli
from dynamo_local.config.loading import parse_overrides
from tests.tools.pages import SHELL, blocks, inline_code, pages, shell_commands, shown


def _in_blocks():
    for page in pages():
        for block in blocks(page):
            if block.language in SHELL:
                for words in shell_commands(block.text):
                    if words[0] in ("dynamo", "dynamo-local"):
                        yield pytest.param(words[1:], id=f"{block.page}:{block.line}:{' '.join(words)[:60]}")


def _in_prose():
    """`dynamo status [--json]` and the like; one that is cut by … only has to name a command."""
    for page in pages():
        for code in dict.fromkeys(inline_code(page)):
            if code.startswith("dynamo ") and "\n" not in code:
                cut = code.partition("…")[0].replace("NAME|COMPONENT", "NAME")
                words = re.sub(r"[\[\]]", "", cut).split()[1:]
                yield pytest.param(words, id=f"{shown(page)}:{code}")


def _check(words: list[str]) -> None:
    """Parse the words as the command would, without running it. Raises click's errors, or `BadInput`."""
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None, f"no command {words[0]!r}"
    rest = words[1:]
    while isinstance(command, click.Group):
        if not rest:
            return
        sub = command.get_command(click.Context(command), rest[0])
        assert sub is not None, f"no command {' '.join(words)!r}"
        command, rest = sub, rest[1:]
    context = command.make_context(words[0], rest)
    if words[0] == "serve":
        parse_overrides(context.params["overrides"])
    if words[0] == "ctl" and context.params["args"]:
        assert context.params["args"][0] in get_commands()


@pytest.mark.parametrize("words", list(_in_blocks()))
def test_command_in_a_block_parses(words):
    _check(words)


@pytest.mark.parametrize("words", list(_in_prose()))
def test_command_in_prose_exists(words):
    if not words or words[0].startswith("-"):
        return
    with contextlib.suppress(click.MissingParameter):  # raised after unknown options are
        _check(words)


@pytest.mark.parametrize(
    "words", [["serv"], ["status", "--jsonn"], ["config", "shema"], ["scale", "VllmWorker", "many"], ["ctl", "explode"]]
)
def test_a_command_that_does_not_exist_is_noticed(words):
    """Else the tests above would pass for anything."""
    with pytest.raises((AssertionError, click.UsageError)):
        _check(words)


def test_shell_words_are_found_in_every_form():
    text = "$ a 'b c' && d \\\n  -e # why\nf | g; h\n"
    assert list(shell_commands(text)) == [["a", "b c"], ["d", "-e"], ["f"], ["g"], ["h"]]
